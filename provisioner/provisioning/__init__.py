"""The main job: recipe and lock to a proven environment. Inspect, plan, execute, report."""
