"""Output of a search for people: progress, forecast, result, refusals."""
