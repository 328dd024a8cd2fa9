"""What other tools read: Harbor tasks, Inspect tasks and logs, SWE-bench-style predictions."""
