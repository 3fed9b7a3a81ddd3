"""What both stages train on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lolcats.config.section import Section


class DataSource(Section):
    """One data set of the mixture."""

    path: str
    """Hub id, or local .json, .jsonl(.gz), .parquet, .txt file, folder or glob; "demo": shipped text;
    "passkey": generated retrieval texts of `sequence_length` tokens (10000 unless `max_rows` says otherwise)."""
    name: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a hub data set."""
    weight: float = Field(1.0, gt=0.0)
    """Share of this source in the mixture, relative to the other sources' weights. With one source, or
    equal weights everywhere, every source is used in full."""
    format: Literal["auto", "alpaca", "chat", "text", "multiple_choice"] = "auto"
    """alpaca: instruction, input, output; chat: messages, or alpaca records through the tokenizer's chat
    template; text: plain documents; multiple_choice: question, choices, answerKey (CommonsenseQA, ARC), five
    to a sample in MMLU's format; auto: from the columns."""
    text_column: str | None = None
    """Column of plain documents; null: "text"."""
    max_rows: int | None = Field(None, ge=1)
    """Use the first rows only."""
    loss_on: Literal["answer", "all"] | None = None
    """As `data.loss_on`, for this source; null: as there."""
    seed: int = Field(0, ge=0)
    """Of generated texts ("passkey") and of the examples in multiple_choice samples."""


class DataSection(Section):
    """Training and validation data of both stages."""

    sources: list[DataSource] = []
    sequence_length: int = Field(1024, ge=2)
    """Tokens of a packed training sequence."""
    loss_on: Literal["answer", "all"] = "answer"
    """answer: labels on the answers of instruction records only; plain text always has labels on all."""
    reset_documents: bool = False
    """Keep packed documents apart: positions restart and attention does not cross their borders."""
    position_offset: Literal["auto"] | Annotated[int, Field(ge=0)] = 0
    """Training sequences start at different positions up to this one (0: all at 0), so that feature maps, which see
    rotated queries and keys, learn to do without the position. At most the model's positions less `sequence_length`;
    auto: seven times `sequence_length`, as far as the model's positions go."""
    position_jumps: Literal["auto"] | Annotated[int, Field(ge=0)] = 0
    """At so many random places of a training sequence positions jump ahead, `position_offset` being the most that they
    gain in all: distances of long texts in short sequences (PoSE, arXiv:2309.10400). Layers with a native sliding
    window teach no distances beyond it, and documents kept apart have no gaps; auto: 1 without these, else 0."""
    position_share: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the training sequences that `position_offset` and `position_jumps` move; the others stay where short
    texts are read."""
    begin_token: bool = False
    """Begin every packed sequence with the tokenizer's begin token. Models whose attention rests on it (Gemma)
    need that: without, they are poor teachers."""
    validation_rows: int = Field(200, ge=1)
    """The first rows of each source are the validation split (before shuffling, never trained on)."""
    validation_sequences: int | None = Field(None, ge=1)
    """At most this many packed validation sequences."""
    max_train_tokens: int | None = Field(None, ge=1)
    """Stop packing after this many training tokens."""
    top_esl: int | None = Field(None, ge=1)
    """Train on this many sequences only: those with the longest effective sequence length under the model's
    softmax attention (arXiv:2410.10254, appendix "Sample Lengths"); null: on all."""

    @model_validator(mode="after")
    def _jumps_have_room(self) -> DataSection:
        if self.position_jumps in (0, "auto"):
            return self
        if not self.position_offset:
            raise ValueError("position_jumps needs a position_offset, what positions may gain in all; or set it to 0")
        if self.reset_documents:
            raise ValueError("positions cannot jump within a document that reset_documents keeps apart: set one to 0")
        if int(self.position_jumps) >= self.sequence_length:
            raise ValueError(f"position_jumps={self.position_jumps} in {self.sequence_length} tokens: expected fewer")
        return self
