"""What lies below is graded, never collected."""

collect_ignore_glob = ["*"]
