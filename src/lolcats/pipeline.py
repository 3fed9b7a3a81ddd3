"""The whole way: a pretrained model in, a linearized one out.

    load -> data -> stage 1 (transfer) -> exact heads (gates) -> stage 2 (adjust) -> export

The output folder holds the model; its `run/` folder holds what an interrupted run needs to resume. Nothing is written
before everything that can be refused has been checked. Each stage is a function over a `Run`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console

from lolcats.checkpoint.read import checkpoint_folder
from lolcats.checkpoint.verify import ROUNDED_TOLERANCE, reload_check
from lolcats.checkpoint.write import export, stored_weights
from lolcats.config import DataSection, LinearizeConfig
from lolcats.conversion import convert, covered_positions, fit_positions, positions_of, stage_section
from lolcats.data import build_datasets
from lolcats.data.cache import content_hash
from lolcats.data.retrieval import FACTS, retrieval_dataset
from lolcats.errors import UserError
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.modeling.attention import SOFTMAX, AttentionCall
from lolcats.modeling.balance import balance_keys
from lolcats.modeling.cache_size import REPORTED_TOKENS, cache_sizes, heads_in_budget
from lolcats.modeling.fused import fused_kernels
from lolcats.modeling.loading import load_base_model
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.blockwise.blocks import Blocks
from lolcats.parallel.blockwise.partial_model import load_in_parts
from lolcats.parallel.sharding import load_sharded
from lolcats.provenance import provenance
from lolcats.report import (
    COST_COLUMNS,
    REPORT_FILE,
    begin_report,
    cost_rows,
    model_card,
    read_optional,
    stage_summary,
    table,
    write_text,
)
from lolcats.run import Run, Splits, open_run
from lolcats.self_data import written_file, written_key
from lolcats.training.attention_transfer import TransferStage
from lolcats.training.finetune import AdjustStage
from lolcats.training.head_gates import FAR_TEXTS, GateStage, Head, by_gate, far_length, heads_picture, settle
from lolcats.training.loop import train
from lolcats.training.progress import Progress

GATE_TEXTS = 32  # for the validation of gates
GATES_ALONE = "heads are chosen by gates alone:"
PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


def linearize(
    config: LinearizeConfig,
    output: Path | str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    transfer_from: Path | str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Linearize a model as `config` says and write it to `output`.

    Started by torchrun, all processes call this with the same arguments and share the work (`config.parallel`).

    Args:
        output: a new or empty folder, unless `resume` (the run in it) or `overwrite` (begin again;
            the model in it is replaced, other files and the old run stay).
        transfer_from: folder of a run with the same settings up to stage 1, from which to take it; and the gates, if
            they were learned with the same settings too.
        console: where progress and the final table go; None: a console on stderr.

    Returns:
        The report, as written to `lolcats_report.json`.

    Raises:
        UserError: whatever the user can fix. What is refused at the start leaves `output` as it was.
    """
    options: dict[str, Any] = {"resume": resume, "overwrite": overwrite}
    options["transfer_from"] = None if transfer_from is None else Path(transfer_from)
    with open_run(config, Path(output), console, **options) as run:
        load(run)
        prepare_data(run)
        run.begin()
        measure(run, "teacher", "softmax")
        if run.partial is None:
            measure(run, "swapped")
        train_stage_1(run)
        choose_heads(run)
        export_model(run, train_stage_2(run))
        return run.report


# --- model and data -----------------------------------------------------------------------------------------


def load(run: Run, *, whole: bool = False) -> None:
    """The converted model and its tokenizer: whole, sharded, or in parts for a stage 1 in blocks.

    Args:
        whole: not in parts; for what comes after stage 1.
    """
    config, group = run.config, run.group
    run.partial = None
    if run.in_blocks and not whole:
        with group.main_first():
            run.partial, run.tokenizer = load_in_parts(config, group.device)
        run.model = run.partial.model
    elif run.sharded:
        run.model, run.tokenizer = load_sharded(config.model, config.attention, group)
    else:
        device = config.model.device if group.device is None else str(group.device)
        section = config.model.model_copy(update={"device": device})
        with group.main_first():  # the first process writes the rows of the model's own, the others find them
            for stage in ("transfer", "adjust"):
                for source in config.data_of(stage).written_sources:
                    if (key := written_key(source)) not in run.written:
                        run.written[key] = written_file(section, source, config.seed, run.console)
        with group.sync_errors():
            base, run.tokenizer = load_base_model(section)
            run.model = convert(base, config.attention)
    run.base_dtype = run.model.model.dtype


def prepare_data(run: Run) -> None:
    """Each stage's training and validation data, and the validation data of `data`, on which all is measured."""
    config, base = run.config, run.model.model
    stages = [stage for stage in ("transfer", "adjust") if stage in run.sections]
    with run.group.main_first():  # which fills the cache
        sections: dict[str, DataSection] = {stage: stage_section(config, stage, base) for stage in stages}
        if sections:
            run.console.print(covered_positions(sections, base), highlight=False, soft_wrap=True)
        built: dict[str, Splits] = {}
        for stage, section in sections.items():
            key = section.model_dump_json()
            if key not in built:
                built[key] = _build(run, section)
            run.data[stage] = built[key]
        whole = fit_positions(config.data, base)
        shared = built.get(whole.model_dump_json())
        if shared is None and run.partial is not None and not config.adjust.enabled:
            shared = run.data["transfer"]  # nothing is measured
        run.validation = _build(run, whole, only_validation=True)[1] if shared is None else shared[1]
        if "gates" in run.sections:
            section = run.sections["gates"]
            count, length = section.total_steps(1) * section.batch_size, section.fitting_length(positions_of(base))
            texts = partial(retrieval_dataset, run.tokenizer, section.haystack, seed=config.seed)
            run.data["gates"] = texts(count=count, length=length), texts(count=GATE_TEXTS, length=length, first=count)
            chunk = getattr(base.config.get_text_config(), "attention_chunk_size", None)  # the longest row it takes
            if far := far_length(section, min(positions_of(base), chunk or positions_of(base))):
                try:
                    run.far = texts(count=FAR_TEXTS, length=far, kind=FACTS)
                except UserError as error:
                    run.console.print(f"{GATES_ALONE} no texts of {far} tokens: {error}", **PLAIN)
    run.report = begin_report(config, {stage: run.data[stage][0] for stage in stages}, run.validation)
    if run.written:
        run.report["data"]["written"] = [report for _, report in run.written.values()]
    if run.partial is not None:
        data = dict(zip(("train", "validation"), run.data["transfer"], strict=True))
        identity = run.identity("transfer", data["validation"])
        run.blocks = Blocks(config, run.partial, data, run.folder / "transfer", identity, run.console)


def _build(run: Run, section: DataSection, only_validation: bool = False) -> Splits:
    sources = [
        source
        if (key := written_key(source)) not in run.written
        else source.model_copy(update={"path": str(run.written[key][0]), "answers": "given", "max_rows": None})
        for source in section.sources
    ]
    section = section.model_copy(update={"sources": sources})
    if only_validation:
        section = section.model_copy(update={"max_train_tokens": section.sequence_length})
    options = {"seed": run.config.seed, "vocabulary": run.model.config.text_config.vocab_size}
    return build_datasets(section, run.tokenizer, progress=run.group.is_main, **options)


# --- stages -------------------------------------------------------------------------------------------------


def measure(run: Run, name: str, mode: str = "hybrid") -> None:
    """Validation perplexity of a whole model, as `name` in the report."""
    if run.partial is not None:
        return
    with run.console.status(f"perplexity: {name}"):
        found = dataset_perplexity(
            run.model.eval(),
            run.validation,
            batch_size=run.config.adjust.micro_batch_size,
            group=run.group,
            attention_call=AttentionCall(mode=mode),
        )["perplexity"]
    run.report["perplexity"][name] = found
    run.console.print(f"validation perplexity, {name}: {found:.3f}")


def _train(run: Run, stage: TransferStage | GateStage | AdjustStage) -> None:
    section = run.sections[stage.name]
    with fused_kernels(run.model, section.fused_kernels):
        result = train(
            stage,
            run.data[stage.name][0],
            section,
            seed=run.config.seed,
            directory=run.folder / stage.name,
            resume=run.continues,
            progress=Progress(run.console, run.tracking),
            fingerprint=run.identity(stage.name, stage.validation),
        )
    run.report["stages"][stage.name] = stage_summary(result)
    stage.graphs.release()


def train_stage_1(run: Run) -> None:
    """Attention transfer, of all layers jointly or block by block; then the model is whole, if stage 2 follows."""
    if "transfer" not in run.sections:
        return
    if run.blocks is None:
        _, validation = run.data["transfer"]
        _train(
            run,
            TransferStage(run.model, run.sections["transfer"], validation, group=run.group, report=run.console.print),
        )
    else:
        with run.group.main_first():
            run.blocks.stream(resume=run.continues or not run.group.is_main)
        if run.config.adjust.enabled:
            load(run, whole=True)
            measure(run, "teacher", "softmax")
        with run.group.sync_errors():
            run.report["stages"]["transfer"] = run.blocks.install(run.model)
    measure(run, "transfer")


def choose_heads(run: Run) -> None:
    """As many exact heads as the budget allows: those with the largest gates; next to the border, what texts need that
    are longer than the gates'."""
    budget = run.config.attention.exact_budget
    if "gates" in run.sections and budget is not None:
        section, validation = run.sections["gates"], run.data["gates"][1]
        stage = GateStage(run.model, section, validation, group=run.group, report=run.console.print)
        _train(run, stage)
        stage.close()
        gates = stage.values()
        within_budget = partial(heads_in_budget, run.model.config, budget, run.base_dtype)
        ranked = by_gate(gates)
        ranked, far = _settled(run, stage, ranked, sum(map(len, within_budget(ranked).values())))
        chosen = within_budget(ranked)
        run.console.print(heads_picture(gates, chosen))
        run.report["gates"] = {"budget": budget, "values": gates, "chosen": chosen}
        run.report["gates"]["far"] = {f"{layer}.{head}": cost for (layer, head), cost in far.items()}
        run.model.set_exact(chosen)
        measure(run, "gates")
    run.report["exact_heads"] = run.model.config.exact_heads
    own, softmax = cache_sizes(run.model.config, REPORTED_TOKENS, run.base_dtype)
    own = softmax if run.config.adjust.softmax_control else own
    run.report["cache"] = {"tokens": REPORTED_TOKENS, "bytes": own, "softmax_bytes": softmax}


def _settled(run: Run, stage: GateStage, ranked: list[Head], count: int) -> tuple[list[Head], dict[Head, float]]:
    """`settle` in long texts, if there are any. What they find is kept in the run's folder: a resumed stage 2 goes on
    with the same heads."""
    if (texts := run.far) is None:
        return ranked, {}
    file, length = run.folder / "gates" / "far.json", texts.input_ids.shape[1]

    def costs(kept: list[Head], left_out: list[Head]) -> list[float]:
        asked, saved = f"{left_out} of {kept}", read_optional(file)
        if saved is None or saved["asked"] != asked:
            saved = {"asked": asked, "costs": stage.costs(kept, left_out, texts)}
            with run.group.sync_errors():
                if run.group.is_main:
                    write_text(file, json.dumps(saved))
        return list(saved["costs"])

    try:
        ranked, far = settle(ranked, count, costs)
    except torch.OutOfMemoryError as error:
        failed = f"out of memory in texts of {length} tokens"
        if run.group.world > 1:  # the others wait
            raise UserError(f"{failed}: lower gates.sequence_length; --transfer-from keeps stage 1") from error
        run.console.print(f"{GATES_ALONE} {failed}", **PLAIN)
        return ranked, {}
    found = ", ".join(f"{layer}.{head}: {cost:.3f}" for (layer, head), cost in far.items())
    run.console.print(f"divergence in texts of {length} tokens without {found}", **PLAIN)
    return ranked, far


def train_stage_2(run: Run) -> LolcatsForCausalLM | PeftModel:
    """Returns the model with its adapters."""
    if "adjust" not in run.sections:
        return run.model
    torch.manual_seed(run.config.seed)  # adapters start the same whatever ran before
    _, validation = run.data["adjust"]
    stage = AdjustStage(run.model, run.sections["adjust"], validation, group=run.group, report=run.console.print)
    _train(run, stage)
    measure(run, "adjust", "softmax" if run.config.adjust.softmax_control else "hybrid")
    return stage.model


def export_model(run: Run, trained: LolcatsForCausalLM | PeftModel) -> None:
    """Write the folder, compare it with the model that was measured, and print the table."""
    config, group, report = run.config, run.group, run.report
    if run.model.config.attention.cache_bits == 8 and run.partial is None and not run.sharded:
        report["cache"]["balanced_layers"] = count = balance_keys(run.model.eval())
        run.console.print(f"layers whose keys were balanced for 8 bits: {count}")
    report["identity"] = content_hash(run.identity("adjust", run.validation) | {"heads": run.model.config.exact_heads})
    report["provenance"] = provenance()
    run.model.config.provenance = report["provenance"] | {"config": report["config"]}
    report["weights"] = None
    if config.model.load_in_4bit:
        lora = ", with LoRA merged" if config.adjust.enabled else ""
        report["weights"] = f"The frozen weights were in 4 bits while training; written are the checkpoint's own{lora}."
    control = config.adjust.enabled and config.adjust.softmax_control
    exported: Any = run.model.model if control else trained
    settings: dict[str, Any] = {"report": report, "card": model_card(report)}
    if run.partial is not None:
        settings["weights"] = run.partial.weights()
    else:
        settings["check"] = reload_check(
            trained,
            run.validation,
            batch_size=config.adjust.micro_batch_size,
            group=group,
            attention_call=SOFTMAX if control else None,
            tolerance=ROUNDED_TOLERANCE if config.model.load_in_4bit else None,
        )
    if run.sharded and run.partial is None:
        export(exported, run.tokenizer, run.output, group, **settings)
    else:
        with group.sync_errors():
            if group.is_main and config.model.load_in_4bit:
                folder = checkpoint_folder(run.model.model.name_or_path, config.model.revision)
                settings["weights"] = stored_weights(run.model.model if control else run.model, folder)
            if group.is_main:
                export(exported, run.tokenizer, run.output, **settings)
    if group.is_main and (skipped := report.get("reloaded", {}).get("skipped")):
        run.console.print(f"the written folder was not loaded again to check it: {skipped}")
    run.console.print(table(None, COST_COLUMNS, cost_rows(report)))
    if report["weights"]:
        run.console.print(report["weights"])
    run.console.print(f"written: {run.output} (model, {REPORT_FILE}, run/)")
