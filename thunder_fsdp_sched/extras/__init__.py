"""Optional parts, one room for each option, function or command: see [Note: Core and extras] in ``extensions``."""
