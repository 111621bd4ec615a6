"""What several figures share: one network on one data set."""
