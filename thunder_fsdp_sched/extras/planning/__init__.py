"""Planned steps: clusters, costs, timelines, and the settings that are chosen by them. A default step loads none of it."""
