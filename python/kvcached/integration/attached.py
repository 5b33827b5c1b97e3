"""What is found again through an engine's configs: the way from one seam to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Attached"]


class Attached:
    """Attached to a config, an object of ours goes wherever the engine hands the config, and into the copies that it makes.

    What becomes of it where a config is sent to another process is for `__reduce__` of each class to say.
    """

    _attribute: ClassVar[str]

    @classmethod
    def of(cls, config: Any) -> Self | None:
        """What is attached to a config; None where the engine runs natively."""
        return getattr(config, cls._attribute, None)

    def attach(self, config: Any) -> None:
        """Let `of(config)` find this."""
        setattr(config, self._attribute, self)

    @classmethod
    def detach(cls, config: Any) -> None:
        """Let `of(config)` find nothing."""
        if hasattr(config, cls._attribute):
            delattr(config, cls._attribute)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # engines copy their configs; there is still one of this
