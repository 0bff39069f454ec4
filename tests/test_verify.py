"""Which member, what is said of it, and whether what was cut is what the nest holds."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_laws as laws
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_arch import NANO
from test_inspect import nano_shapes, write_hollow

from nestling import hf
from nestling.checkpoint import INDEX, SINGLE, Checkpoint, read_json, write_json
from nestling.choose import AS_STORED, Room, by_fit, by_sizes, needed
from nestling.cli import main
from nestling.elastic import ElasticModel
from nestling.inspect import describe, inspect
from nestling.nest import Member, Nest, open_nest, write_nest
from nestling.presets import Preset, find_preset
from nestling.slice import slice as slice_member
from nestling.sort import sort
from nestling.verify import check_against, check_folder

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A sorted tiny hybrid with a tokenizer and two more members, one of them trained."""
    root = tmp_path_factory.mktemp("verify")
    parent = tiny.save("nemotron_h", root / "parent", is_chatty=True)
    layout = open_nest(parent).layout
    nest = sort(parent, tiny.random_orders(layout, torch.Generator().manual_seed(0)), root / "nest")
    nest.members["wide"] = Member(name="wide", sizes={"hidden": 40, "effn": 16}, is_trained=True)
    nest.members["thin"] = Member(name="thin", sizes={"hidden": 32, "layer": 4}, is_trained=True)
    nest.members["odd"] = Member(name="odd", sizes={"hidden": 16})
    write_nest(nest, root / "nest")
    return root / "nest"


def run(*argv: object) -> tuple[int, str, str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "nestling", *map(str, argv)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


# Which member.


def test_sizes_of_a_member_are_that_member_and_others_are_said_to_be_untrained(folder, tmp_path, capsys):
    nest = open_nest(folder)
    assert by_sizes(nest, "effn=16,hidden=40").name == "wide"
    assert by_sizes(nest, "hidden=48").name == "100"
    assert main(["slice", str(folder), "--sizes", "hidden=24,ffn=20", "--to", str(tmp_path / "to")]) == 0
    out = capsys.readouterr().out
    assert "member hidden24-ffn20 is an untrained size" in out
    assert "member hidden24-ffn20 (untrained): " in out
    card = (tmp_path / "to" / "README.md").read_text()
    assert "an untrained size" in card
    assert "--sizes hidden=24,ffn=20" in card
    assert hf.load_model(tmp_path / "to").config.hidden_size == 24


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "which member? Expected a member's name, --sizes or --fit"),
        (["wide", "--sizes", "hidden=24"], "given: wide, hidden=24"),
        (["--sizes", "hidden=99"], "the nest has 48"),
        (["--sizes", "vocab=9"], "cannot shrink here"),
        (["--sizes", "hidden=24.5"], "not a whole number"),
        (["wide", "--context", "9"], "--context has no effect without --fit"),
        (["wide", "--format", "bf16"], "--format has no effect without --fit"),
        (["--fit", "lots"], "cannot read 'lots' as bytes"),
        (["--fit", "1MB", "--format", "int3"], "--format int3 is not one of"),
        (["--fit", "1MB", "--batch", "0"], "at least one sequence"),
        (["--per-layer", "plan.json"], "no stock class of these architectures reads a list"),
        (["wide", "--drop", "mtp"], "--drop mtp has no effect"),
        (["wide", "--shard-size", "0"], "holds nothing"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_nothing_written(folder, tmp_path, capsys, flags, message):
    assert main(["slice", str(folder), *flags, "--to", str(tmp_path / "to")]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def bytes_by_hand(weights: Path, context: int, batch: int) -> int:
    """bf16 weights from the headers of a folder that was really cut, caches from its stock config."""
    config = hf.load_model(weights).config
    parameters = sum(t.numel() for t in load_file(weights / SINGLE).values())
    kinds = config.layers_block_type
    kv = kinds.count("full_attention") * 2 * config.num_key_value_heads * config.head_dim * 2 * context
    inner = config.mamba_num_heads * config.mamba_head_dim
    ssm = inner * config.ssm_state_size * 4
    conv = (inner + 2 * config.n_groups * config.ssm_state_size) * config.conv_kernel * 2
    return 2 * parameters + batch * (kv + kinds.count("linear_attention") * (ssm + conv))


def test_fit_takes_the_largest_trained_member_whose_weights_and_caches_fit(folder, tmp_path):
    nest = open_nest(folder)
    least = {}
    for name in ("100", "wide", "thin", "odd"):
        cut = slice_member(nest, nest.member(name), tmp_path / name)
        least[name] = bytes_by_hand(cut, context=100, batch=3)
        assert needed(nest, nest.member(name), Room(nbytes=1, context=100, batch=3)) == least[name]
    assert least["odd"] < least["thin"] < least["wide"] < least["100"]
    for name in ("100", "wide", "thin"):
        assert by_fit(nest, Room(nbytes=least[name], context=100, batch=3)).name == name
    assert by_fit(nest, Room(nbytes=least["100"] - 1, context=100, batch=3)).name == "wide"
    # `odd` would fit, but it was never trained.
    with pytest.raises(ValueError, match=rf"the smallest, thin, needs {least['thin']:,} "):
        by_fit(nest, Room(nbytes=least["thin"] - 1, context=100, batch=3))


def test_fit_shows_its_arithmetic(folder, tmp_path, capsys):
    room = needed(
        open_nest(folder), open_nest(folder).member("wide"), Room(nbytes=1, weight_format=AS_STORED, context=64)
    )
    argv = ["slice", str(folder), "--fit", str(room), "--context", "64", "--to", str(tmp_path / "to")]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.split()[:1] in (["100"], ["wide"], ["thin"])}
    assert [rows[name][-1] for name in ("100", "wide", "thin")] == ["no", "yes", "yes"]
    for row in rows.values():
        weights, kv, states, total = (int(cell.replace(",", "")) for cell in row[1:5])
        assert weights + kv + states == total
    assert any(line.startswith("member wide: ") for line in lines)


# Dry runs.


def test_a_dry_run_names_every_cut_and_writes_nothing_and_loads_no_torch(folder, tmp_path):
    before = {f: f.stat().st_mtime_ns for f in folder.rglob("*")}
    code = "import sys; from nestling.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "slice", str(folder), "thin", "--dry-run", "--to", str(tmp_path / "to")]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not list(tmp_path.iterdir())
    assert before == {f: f.stat().st_mtime_ns for f in folder.rglob("*")}
    small = slice_member(open_nest(folder), open_nest(folder).member("thin"), tmp_path / "real")
    for name, tensor in load_file(small / SINGLE).items():
        (line,) = (line for line in out.splitlines() if line.startswith((f"{name}:", f"{name} from")))
        assert line.endswith(f"-> [{', '.join(map(str, tensor.shape))}]")
    assert "config.json: hidden_size: 48 -> 32" in out
    assert "config.json: layers_block_type: " in out
    assert f"{Checkpoint(small).nbytes:,} bytes of {Checkpoint(folder).nbytes:,}" in out
    assert "to write: " in out


# Presets: the disk layout of the released elastic checkpoint, small.

SMALL_PRESET = Preset(
    source="a test",
    model_type="nemotron_h",
    sizes={"layer": 5, "hidden": 48, "effn": 24, "expert": 6, "mamba": 3, "group": 2},
    members={"full-size": {}, "middle": {"hidden": 40}, "least": {"hidden": 32, "effn": 12}},
    notes={"middle": "sizes inferred: from a test"},
    caution="right for the elastic one only",
)


@pytest.fixture
def released(tmp_path) -> Path:
    """As published: bf16 with fp32 exceptions, one tensor an expert, several shards, a pattern string, remote code."""
    parent = tiny.save("nemotron_h", tmp_path / "saved", is_mixed=True, is_chatty=True)
    config = read_json(parent / "config.json")
    letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config.pop("layers_block_type"))
    config["auto_map"] = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    (parent / "configuration_own.py").write_text("raise SystemExit('remote code was run')\n")
    write_json(parent / "config.json", config)
    weights = load_file(parent / SINGLE)
    (parent / SINGLE).unlink()
    names, weight_map = sorted(weights), {}
    assert {name.split(".")[0] for name in names} == {"backbone", "lm_head"}
    for i in range(3):
        file = f"model-{i + 1:05d}-of-00003.safetensors"
        save_file({n: weights[n] for n in names[i::3]}, parent / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names[i::3], file)
    write_json(parent / INDEX, {"metadata": {"total_size": 1}, "weight_map": weight_map})
    return parent


@pytest.mark.parametrize("name", ["middle", "least"])
def test_a_released_checkpoint_is_cut_by_its_preset_to_what_the_member_is_on_live_weights(released, tmp_path, name):
    nest = open_nest(released, presets=(SMALL_PRESET,))
    assert list(nest.members) == ["100", "full-size", "middle", "least"]
    said: list[str] = []
    small = slice_member(nest, nest.member(name), tmp_path / "small", say=said.append)
    assert ("sizes inferred" in " ".join(said)) == (name == "middle")
    assert "right for the elastic one only" in " ".join(said)
    live = ElasticModel(hf.load_model(released))
    with torch.no_grad():
        expected = live(live.run_of(nest.member(name).sizes), input_ids=tiny.tokens(), use_cache=False).logits
    assert torch.equal(tiny.logits(hf.load_model(small)), expected)
    laws.stock_load(small)  # also in its own types
    assert {"modeling_own.py", "configuration_own.py"} <= {f.name for f in small.iterdir()}
    before, after = Checkpoint(released).entries, Checkpoint(small).entries
    assert {n: e.dtype for n, e in before.items()} == {n: e.dtype for n, e in after.items()}
    assert Checkpoint(small).config["hybrid_override_pattern"] == "ME*-M"


def test_a_released_checkpoint_is_found_by_exact_sizes_only(released):
    assert list(open_nest(released).members) == ["100"]
    sizes = dict(SMALL_PRESET.sizes)
    assert find_preset("nemotron_h", sizes, (SMALL_PRESET,)) is SMALL_PRESET
    assert find_preset("nemotron_h", sizes | {"hidden": 47}, (SMALL_PRESET,)) is None
    assert find_preset("llama", sizes, (SMALL_PRESET,)) is None


@pytest.fixture(scope="module")
def nano(tmp_path_factory) -> Path:
    """The 30B's folder, one file that is all header and hole."""
    at = tmp_path_factory.mktemp("nano30")
    (at / "config.json").write_text(json.dumps(NANO))
    write_hollow(at / "model.safetensors", nano_shapes())
    return at


def test_inspect_lists_the_members_of_the_released_30b_and_marks_what_is_inferred(nano):
    told = inspect(nano)
    counts = {name: (one["parameters"], one["active_parameters"]) for name, one in told["members"].items()}
    assert counts["30B"] == counts["100"] == (31_577_940_288, 3_580_076_352)
    assert counts["23B"] == (23_683_657_248, 2_685_259_296)
    assert counts["12B"] == (12_426_658_368, 2_082_619_968)
    text = describe(told)
    assert "23B: sizes inferred" in text
    assert "12B: right for the elastic checkpoint only" in text


def test_the_12b_is_the_largest_that_fits_into_32_gib_in_bf16(nano):
    nest = open_nest(nano)
    assert by_fit(nest, Room(nbytes=32 * 1024**3, context=32768)).name == "12B"
    assert by_fit(nest, Room(nbytes=48 * 1024**3, context=32768)).name == "23B"
    # 24,853,316,736 bytes of weights, 32768 x 6144 of KV, 48,234,496 of SSM and 23 x 6144 x 4 x 2 of conv state.
    total = 24_853_316_736 + 32768 * 6144 + 48_234_496 + 23 * 6144 * 4 * 2
    assert needed(nest, nest.member("12B"), Room(nbytes=1, context=32768)) == total


# What lies around the tensors.


def test_the_template_is_the_parents_in_both_spellings(folder, tmp_path):
    parent = shutil.copytree(folder, tmp_path / "parent")
    told = read_json(parent / "tokenizer_config.json")
    write_json(parent / "tokenizer_config.json", told | {"chat_template": "{{ 'inside' }}"})
    both = slice_member(open_nest(parent), open_nest(parent).member("thin"), tmp_path / "both")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert (both / name).read_bytes() == (parent / name).read_bytes()
    (parent / "chat_template.jinja").unlink()
    inside = slice_member(open_nest(parent), open_nest(parent).member("thin"), tmp_path / "inside")
    for at in (both, inside):
        source = parent if at == inside else folder
        assert hf.load_tokenizer(at).chat_template == hf.load_tokenizer(source).chat_template
    assert hf.load_tokenizer(inside).chat_template == "{{ 'inside' }}"


def test_a_stale_quantization_description_is_not_copied(folder, tmp_path):
    parent = shutil.copytree(folder, tmp_path / "parent")
    (parent / "hf_quant_config.json").write_text("{}")
    said: list[str] = []
    small = slice_member(open_nest(parent), open_nest(parent).member("thin"), tmp_path / "small", say=said.append)
    assert "note: hf_quant_config.json speaks of quantized weights, and there are none: it is left out." in said
    assert not (small / "hf_quant_config.json").exists()


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_tied_head_that_is_stored_twice_is_written_once_or_refused(parents, tmp_path, is_copy):
    parent = shutil.copytree(parents("llama_tied"), tmp_path / "parent")
    weights = load_file(parent / SINGLE)
    head = weights["model.embed_tokens.weight"].clone()
    if not is_copy:
        head[5, 5] += 1
    save_file(weights | {"lm_head.weight": head}, parent / SINGLE, {"format": "pt"})
    nest, member = open_nest(parent), Member(name="S", sizes={"ffn": 16})
    if not is_copy:
        with pytest.raises(ValueError, match="tie_word_embeddings"):
            slice_member(nest, member, tmp_path / "small")
        return
    said: list[str] = []
    small = slice_member(nest, member, tmp_path / "small", say=said.append)
    assert "lm_head.weight" not in load_file(small / SINGLE)
    assert any("stored once" in line for line in said)
    plain = slice_member(open_nest(parents("llama_tied")), member, tmp_path / "plain")
    assert torch.equal(tiny.logits(laws.stock_load(small)), tiny.logits(laws.stock_load(plain)))
    assert inspect(parent)["parameters"] == inspect(parents("llama_tied"))["parameters"]
    assert "lm_head.weight" not in Checkpoint(sort(parent, {}, tmp_path / "nest").folder).entries


def test_a_head_for_multi_token_prediction_is_dropped_only_knowingly(parents, tmp_path):
    parent = shutil.copytree(parents("nemotron_h"), tmp_path / "parent")
    weights = load_file(parent / SINGLE)
    save_file(weights | {"mtp.layers.0.norm.weight": torch.ones(48)}, parent / SINGLE, {"format": "pt"})
    write_json(parent / "config.json", read_json(parent / "config.json") | {"num_nextn_predict_layers": 1})
    nest, member = open_nest(parent), Member(name="S", sizes={"hidden": 32})
    with pytest.raises(ValueError, match="--drop mtp"):
        slice_member(nest, member, tmp_path / "small")
    small = slice_member(nest, member, tmp_path / "small", drop="mtp")
    assert not any(name.startswith("mtp") for name in load_file(small / SINGLE))
    assert read_json(small / "config.json")["num_nextn_predict_layers"] == 0
    assert "multi-token prediction was left out" in (small / "README.md").read_text()


def test_shards_are_as_large_as_asked_and_load_in_the_stock_class(folder, tmp_path, capsys):
    argv = ["slice", str(folder), "thin", "--shard-size", "20KB", "--to", str(tmp_path / "many")]
    assert main(argv) == 0
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert all(f.name.endswith(f"-of-{len(files):05d}.safetensors") for f in files)
    index, one = (
        read_json(tmp_path / "many" / INDEX),
        slice_member(open_nest(folder), open_nest(folder).member("thin"), tmp_path / "one"),
    )
    whole = load_file(one / SINGLE)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in whole.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "many" / file)[name], whole[name])
    assert index["weight_map"].keys() == whole.keys()
    assert torch.equal(tiny.logits(laws.stock_load(tmp_path / "many")), tiny.logits(laws.stock_load(one)))
    assert f"file {len(files)} of {len(files)}" in capsys.readouterr().out


def test_every_tensor_of_a_mixed_file_starts_at_a_whole_number_of_its_own_values(tmp_path):
    parent = tiny.save("nemotron_h", tmp_path / "parent", is_mixed=True)
    small = slice_member(open_nest(parent), Member(name="S", sizes={"hidden": 17, "mamba": 1}), tmp_path / "small")
    widths = {"F32": 4, "BF16": 2}
    assert all(entry.start % widths[entry.dtype] == 0 for entry in Checkpoint(small).entries.values())


# Verify.


@pytest.fixture
def slice_of(folder, tmp_path) -> tuple[Nest, Path]:
    nest = open_nest(folder)
    return nest, slice_member(nest, nest.member("thin"), tmp_path / "small")


def test_a_slice_is_verified_alone_and_against_its_nest(slice_of, folder, capsys):
    nest, small = slice_of
    assert main(["verify", str(small), "--against", str(folder), "thin"]) == 0
    out = capsys.readouterr().out
    assert "every shape is the config's" in out
    assert "every value is the nest's, bit by bit" in out
    assert "logits on 64 random tokens: bit-equal" in out
    assert out.endswith("sound\n")
    assert check_against(small, nest, by_sizes(nest, "hidden=32,layer=4"))


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_verify_passes_on_every_architecture(parents, tmp_path, name):
    nest = open_nest(parents(name))
    sizes = tiny.random_sizes(nest.layout, torch.Generator().manual_seed(1))
    member = Member(name="S", sizes=sizes)
    lines = check_against(slice_member(nest, member, tmp_path / "small"), nest, member)
    assert lines[-1].startswith("logits on 64 random tokens")


@pytest.mark.parametrize(
    "end", ["embeddings.weight", "in_proj.weight", "conv1d.weight", "experts.5.down_proj.weight", "lm_head.weight"]
)
def test_one_flipped_bit_in_a_slice_is_found_and_named(slice_of, end):
    nest, small = slice_of
    part = next(name for name in Checkpoint(small).entries if name.endswith(end))
    entry = Checkpoint(small).entries[part]
    data = bytearray((small / SINGLE).read_bytes())
    data[entry.start + entry.nbytes - 4] ^= 1
    (small / SINGLE).write_bytes(data)
    check_folder(small)
    with pytest.raises(ValueError, match=rf"{part}' in .* differs"):
        check_against(small, nest, nest.member("thin"))


def test_a_slice_of_another_member_or_with_another_config_is_found(slice_of, folder):
    nest, small = slice_of
    with pytest.raises(ValueError, match=r"does not hold the tensors of member wide|is not that of member wide"):
        check_against(small, nest, nest.member("wide"))
    write_json(small / "config.json", read_json(small / "config.json") | {"routed_scaling_factor": 9.0})
    with pytest.raises(ValueError, match="not that of member thin: routed_scaling_factor"):
        check_against(small, nest, nest.member("thin"))


def test_a_dtype_that_changed_is_found(slice_of):
    nest, small = slice_of
    weights = load_file(small / SINGLE)
    weights["lm_head.weight"] = weights["lm_head.weight"].bfloat16()
    save_file(weights, small / SINGLE, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight' in .* is BF16 .*expected F32"):
        check_against(small, nest, nest.member("thin"))


def break_total(small: Path) -> None:
    index = read_json(small / INDEX)
    index["metadata"]["total_size"] += 1
    write_json(small / INDEX, index)


def break_index(small: Path) -> None:
    index = read_json(small / INDEX)
    index["weight_map"].popitem()
    write_json(small / INDEX, index)


def break_norm(small: Path) -> None:
    file = small / read_json(small / INDEX)["weight_map"]["backbone.norm_f.weight"]
    weights = load_file(file)
    weights["backbone.norm_f.weight"][3] = float("nan")
    save_file(weights, file, {"format": "pt"})


def break_code(small: Path) -> None:
    write_json(small / "config.json", read_json(small / "config.json") | {"auto_map": {"AutoConfig": "gone.Own"}})


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (break_total, "says total_size"),
        (break_index, "omits 1 tensors"),
        (break_norm, r"backbone\.norm_f\.weight' in .* holds infinities or NaN"),
        (break_code, r"remote code in gone\.py, which is not there"),
    ],
)
def test_a_folder_that_is_not_whole_is_found_without_its_nest(folder, tmp_path, harm, message):
    nest = open_nest(folder)
    small = slice_member(nest, nest.member("thin"), tmp_path / "small", shard_bytes=20_000)
    assert check_folder(small)
    harm(small)
    with pytest.raises(ValueError, match=message):
        check_folder(small)


def test_verify_reads_members_by_name_and_fails_with_code_two(folder, tmp_path):
    code, out, err = run("verify", tmp_path)
    assert (code, out) == (2, "")
    assert "has no config.json" in err


# Memory.

MEASURED = """
import sys, threading, time
from pathlib import Path
import numpy
from nestling.nest import Member, open_nest
from nestling.slice import slice

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024

peak, done = [0], []
def watch():
    while not done:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.001)

nest = open_nest(sys.argv[1])
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
slice(nest, Member(name="S", sizes={"hidden": 1920}), sys.argv[2])
done.append(1)
watcher.join()
print(peak[0] - before)
"""


def test_memory_does_not_grow_with_the_largest_tensor(tmp_path):
    """An embedding of 352 MB, all hole, is cut within the threads' blocks; whole it would not fit into the bound."""
    config = read_json_of("llama", vocab_size=65536, hidden_size=2688, intermediate_size=8, num_hidden_layers=1,
                          num_attention_heads=2, num_key_value_heads=1, head_dim=4,
                          tie_word_embeddings=True)  # fmt: skip
    parent = tmp_path / "parent"
    parent.mkdir()
    write_json(parent / "config.json", config)
    arch, complete = tiny.find(config)
    layout = arch.layout(complete)
    shapes = {n: tiny_dims(layout, n) for n in layout.tensors}
    write_hollow(parent / SINGLE, shapes)
    command = [sys.executable, "-c", MEASURED, str(parent), str(tmp_path / "small")]
    grown = int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert Checkpoint(tmp_path / "small").nbytes > 65536 * 1920 * 2
    assert grown < 150_000_000


def read_json_of(name: str, **changes: object) -> dict:
    return {"model_type": tiny.VARIANTS[name]["model_type"], **tiny.config(name, **changes).to_dict()}


def tiny_dims(layout, name: str) -> tuple[int, ...]:
    from nestling.axes import dims

    return dims(layout.tensors[name].shape, layout.sizes)
