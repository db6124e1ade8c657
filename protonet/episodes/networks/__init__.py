"""Networks that embed rows (backbones), heads that are trained together with a backbone, and checkpoint files."""
