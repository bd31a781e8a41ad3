"""`selfcon analyze ...`: a module a verb."""
