"""Tools to plan, measure, count and draw steps."""
