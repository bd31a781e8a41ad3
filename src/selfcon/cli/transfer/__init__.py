"""`selfcon transfer ...`: a module a verb."""
