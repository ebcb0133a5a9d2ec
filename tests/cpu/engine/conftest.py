import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "memory"))
disable_progress_bar()
