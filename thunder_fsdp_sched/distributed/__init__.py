"""Process groups: descriptions of them, their creation, and their end."""
