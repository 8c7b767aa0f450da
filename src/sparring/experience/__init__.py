"""Experience: the fragment, its wire form and the check at every door."""

from sparring.experience.fragment import Columns, Fragment, new_id, pack

__all__ = ["Columns", "Fragment", "new_id", "pack"]
