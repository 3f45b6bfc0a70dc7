class Checkpoints:
    def __init__(self, run_dir, trainer): pass
    def resume(self, how): pass
    def save(self): pass
    def save_if_due(self): pass
