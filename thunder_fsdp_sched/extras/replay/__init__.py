"""Schedules in files, and traces that follow one: ``schedule=``."""
