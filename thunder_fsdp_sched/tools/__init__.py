"""Tools that plan, measure, count and draw steps."""
