"""What an option, a function or a command asks for, a room each: see [Note: Core and extras] in ``extensions``."""
