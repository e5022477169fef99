"""From the dataset's rows to the batch of an update."""
