"""Send buckets in low precision: ``comm_policy=CommPolicy(...)``."""
