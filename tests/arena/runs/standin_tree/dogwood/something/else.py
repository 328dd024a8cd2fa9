print("not a task")
