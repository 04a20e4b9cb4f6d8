"""Process groups: their descriptions, creation and shutdown."""
