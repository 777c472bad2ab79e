"""Money and records: prices, sums of usage per hour, and the audit log."""
