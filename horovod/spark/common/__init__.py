"""Code shared by the estimators of all frameworks: parameters, stores and backends."""
