"""Common code of the estimators of all frameworks: parameters, stores and backends."""
