"""What all sections of a configuration have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, fields carry their documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


def _switch(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return {False: "off", True: "auto"}[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "off"], BeforeValidator(_switch)]
"""auto: where it is possible; off: never."""
