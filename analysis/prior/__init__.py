"""The mixture's prior: tasks, what each view does on them, and the small model that is trained on that."""
