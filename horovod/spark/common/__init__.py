"""What the estimators of all frameworks share: parameters, stores and backends."""
