"""Running a training: the loop, what it needs around it, and what keeps its work safe."""
