"""Rules for operators on rows that do not act on each element by itself."""
