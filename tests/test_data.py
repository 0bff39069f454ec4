"""The token stream against an undisturbed stream, and documents and padded batches against what was written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nestling.data import Stream, padded_batches, read_documents
from nestling.padded import PaddedStream, one_pass, stream_of

EOS = 0
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}\n{% endif %}{% endfor %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: 0 is eos, then printable ASCII."""
    vocab = {"$": EOS} | {chr(i): i - 31 for i in range(32, 127) if chr(i) != "$"} | {"\n": 96}
    core = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    core.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="$", chat_template=TEMPLATE)


def write(path: Path, documents: list[Any]) -> str:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return str(path)


def two_files(folder: Path) -> str:
    """Documents of different lengths, capital letters in one file and small ones in the other."""
    upper = write(folder / "upper.jsonl", [{"text": chr(65 + i) * (1 + 7 * i % 11)} for i in range(10)])
    lower = write(folder / "lower.jsonl", [{"text": chr(97 + i) * (1 + 5 * i % 13)} for i in range(20)])
    return f"{upper}=3,{lower}=1"


def documents_of(tokens: list[int], tokenizer: Any) -> list[str]:
    """The complete documents of a stretch of the stream, as text."""
    return tokenizer.decode(tokens).split("$")[:-1]


def test_every_epoch_holds_each_document_once_in_another_order(tmp_path: Path, tokenizer: Any) -> None:
    texts = [chr(65 + i) * (i + 1) for i in range(20)]
    stream = Stream(write(tmp_path / "a.jsonl", [{"text": text} for text in texts]), tokenizer, length=5)
    epoch = sum(len(text) + 1 for text in texts)
    assert epoch % 5 == 0
    first, second = (documents_of(stream.next_batch(epoch // 5).flatten().tolist(), tokenizer) for _ in range(2))
    assert sorted(first) == sorted(second) == texts
    assert len({tuple(first), tuple(second), tuple(texts)}) == 3
    assert list(stream.epochs.values()) == [1]  # the second pass is read, the third not begun


@pytest.mark.parametrize("world", [1, 3])
def test_resuming_from_any_block_gives_the_same_remaining_stream(tmp_path: Path, tokenizer: Any, world: int) -> None:
    sources = two_files(tmp_path)
    whole = Stream(sources, tokenizer, length=13, seed=5, rank=world - 1, world=world)
    states, blocks = [], []
    for _ in range(60):
        states.append(json.dumps(whole.state_dict()))
        blocks.append(whole.next_batch(1))
    assert min(whole.epochs.values()) >= 1
    for i, state in enumerate(states):
        resumed = Stream(sources, tokenizer, length=99, seed=5, rank=world - 1, world=world)
        resumed.load_state_dict(json.loads(state))
        assert resumed.next_batch(60 - i).equal(torch.cat(blocks[i:]))


def test_changing_length_loses_and_repeats_no_token(tmp_path: Path, tokenizer: Any) -> None:
    sources = two_files(tmp_path)
    changing = Stream(sources, tokenizer, length=5)
    tokens = []
    for length in (5, 17, 1, 64):
        changing.set_length(length)
        assert Stream.state_dict(changing)["num_tokens"] == len(tokens)
        tokens += changing.next_batch(3).flatten().tolist()
    assert tokens == Stream(sources, tokenizer, length=len(tokens)).next_batch(1)[0].tolist()


def test_ranks_together_read_what_one_rank_reads(tmp_path: Path, tokenizer: Any) -> None:
    sources = two_files(tmp_path)
    alone = Stream(sources, tokenizer, length=6).next_batch(12)
    ranks = [Stream(sources, tokenizer, length=6, rank=r, world=3) for r in range(3)]
    shares = [torch.cat([stream.next_batch(1), stream.next_batch(3)]) for stream in ranks]
    assert torch.stack(shares, 1).flatten(0, 1).equal(alone)
    assert ranks[0].state_dict() == ranks[1].state_dict() == ranks[2].state_dict()


def test_a_stream_saved_on_three_ranks_goes_on_with_one(tmp_path: Path, tokenizer: Any) -> None:
    sources = two_files(tmp_path)
    saved = Stream(sources, tokenizer, length=6, rank=1, world=3)
    saved.next_batch(2)
    one = Stream(sources, tokenizer, length=6)
    one.load_state_dict(saved.state_dict())
    assert one.next_batch(2).equal(Stream(sources, tokenizer, length=6).next_batch(8)[6:])


def test_mixtures_keep_their_shares_of_tokens_at_every_point(tmp_path: Path, tokenizer: Any) -> None:
    tokens = Stream(two_files(tmp_path), tokenizer, length=4000).next_batch(1)[0]
    documents = documents_of(tokens.tolist(), tokenizer)
    longest = max(map(len, documents)) + 1
    upper = total = 0
    for document in documents:
        total += len(document) + 1
        upper += (len(document) + 1) * document.isupper()
        assert abs(upper - 0.75 * total) <= longest


def test_another_seed_gives_another_order(tmp_path: Path, tokenizer: Any) -> None:
    sources = two_files(tmp_path)
    a, b, c = (Stream(sources, tokenizer, length=200, seed=seed).next_batch(1) for seed in (1, 2, 1))
    assert a.equal(c)
    assert not a.equal(b)


def test_the_three_formats_become_text_that_ends_in_one_eos(tmp_path: Path, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    documents = [{"text": "abc$"}, {"prompt": "1+1=", "completion": "2"}, {"messages": chat}, {"text": "", "id": 3}]
    path = write(tmp_path / "a.jsonl", documents)
    read = [tokenizer.decode(ids) for ids in read_documents(path, tokenizer)]
    assert read == ["abc$", "1+1=2$", "<user>hi<assistant>ho$"]


def test_only_predictions_of_the_completion_count_when_asked(tmp_path: Path, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "thinking": "x"}]
    for document, reply in (
        ({"prompt": "ABC", "completion": "def"}, "def$"),
        ({"messages": chat}, "assistant>(x)yo$"),  # this template writes no prompt for the reply
        ({"text": "plain"}, "lain$"),
    ):
        path = write(tmp_path / "one.jsonl", [document])
        (ids,) = read_documents(path, tokenizer)
        stream = Stream(path, tokenizer, length=len(ids), loss_on="completion")
        (tokens,), (counted,) = stream.next_counted(1)
        assert tokens.tolist() == ids
        predicted = [after for after, counts in zip(ids[1:], counted[:-1].tolist(), strict=True) if counts]
        assert tokenizer.decode(predicted).removeprefix("<") == reply
        assert not counted[-1]  # the next document's first token


def test_the_prompt_of_a_chat_is_as_long_when_an_earlier_turn_spells_its_thoughts_otherwise(
    tmp_path: Path, tokenizer: Any
) -> None:
    lengths = []
    for spelling in ("reasoning_content", "thinking"):
        first = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", spelling: "why"}]
        chat = [*first, {"role": "user", "content": "so"}, {"role": "assistant", "content": "ok"}]
        path = write(tmp_path / "one.jsonl", [{"messages": chat}])
        (ids,) = read_documents(path, tokenizer)
        lengths.append(
            (len(ids), int(Stream(path, tokenizer, length=len(ids), loss_on="completion").next_counted(1)[1].sum()))
        )
    assert lengths[0] == lengths[1]
    assert lengths[0][1] < lengths[0][0] / 2


def test_what_counts_does_not_change_when_a_stream_is_resumed_inside_a_prompt(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "ABCDEFG" * (i + 1), "completion": "xyz"} for i in range(9)])
    whole = Stream(path, tokenizer, length=5, loss_on="completion")
    for _ in range(7):
        whole.next_batch(1)
        again = Stream(path, tokenizer, length=5, loss_on="completion")
        again.load_state_dict(whole.state_dict())
        undisturbed = Stream(path, tokenizer, length=5, loss_on="completion")
        undisturbed.next_batch(whole.num_tokens // 5)
        for one, other in zip(again.next_counted(4), undisturbed.next_counted(4), strict=True):
            assert torch.equal(one, other)
    # Of every document the three letters and the eos are predicted, whatever the blocks.
    fresh = Stream(path, tokenizer, length=5, loss_on="completion")
    total = sum(7 * (i + 1) + 4 for i in range(9))
    _, counted = Stream(path, tokenizer, length=total, loss_on="completion").next_counted(1)
    assert int(counted.sum()) == 9 * 4
    assert torch.equal(fresh.next_counted(total // 5)[1].flatten(), counted.flatten()[: total // 5 * 5])


def rows_of(stream: Stream, batch: int, times: int) -> list[tuple[str, str]]:
    """Text of each row and of what counts in it, over some batches; the padding is checked on the way."""
    found = []
    for _ in range(times):
        ids, is_real, counted = stream.next_rows(batch)
        assert ids.shape == is_real.shape == counted.shape
        assert is_real.sum(1).max() == ids.shape[1]
        assert not (is_real[:, 1:] & ~is_real[:, :-1]).any()  # no real token behind padding
        assert not (counted & ~is_real).any()
        for row, real, counts in zip(ids, is_real, counted, strict=True):
            text = stream.tokenizer.decode(row[real])
            predicted = row[1:][counts[:-1]]
            found.append((text, stream.tokenizer.decode(predicted)))
    return found


def test_padded_rows_hold_one_document_each_and_nothing_of_another(tmp_path: Path, tokenizer: Any) -> None:
    documents = [{"prompt": chr(65 + i) * (1 + i), "completion": chr(97 + i) * (1 + 3 * i % 5)} for i in range(16)]
    stream = PaddedStream(write(tmp_path / "a.jsonl", documents), tokenizer, length=40, loss_on="completion")
    rows = rows_of(stream, 4, 8)
    told = [(one["prompt"] + one["completion"] + "$", one["completion"] + "$") for one in documents]
    assert sorted(rows) == sorted(told * 2)  # two epochs
    assert stream.num_tokens == sum(len(text) for text, _ in rows)
    lengths = [len(text) for text, _ in rows[:32]]
    widths = [max(lengths[i : i + 4]) for i in range(0, 32, 4)]
    assert sum(widths) * 4 < 1.25 * sum(lengths)  # unsorted batches would be half padding


def test_a_document_longer_than_a_padded_row_loses_no_token(tmp_path: Path, tokenizer: Any) -> None:
    text = "".join(chr(65 + i % 26) for i in range(50))
    stream = PaddedStream(write(tmp_path / "a.jsonl", [{"text": text}]), tokenizer, length=20)
    rows = rows_of(stream, 1, 3)
    assert [row for row, _ in rows] == [text[:20], text[20:40], text[40:] + "$"]
    assert rows[-1][1] == text[41:] + "$"


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_a_padded_stream_from_any_batch_gives_the_same_rows(
    tmp_path: Path, tokenizer: Any, world: int
) -> None:
    sources = two_files(tmp_path)
    whole = PaddedStream(sources, tokenizer, length=9, seed=5, rank=world - 1, world=world)
    states, batches = [], []
    for _ in range(30):
        states.append(json.dumps(whole.state_dict()))
        batches.append(whole.next_rows(3))
    assert max(whole.epochs.values()) >= 1
    for i, state in enumerate(states):
        resumed = PaddedStream(sources, tokenizer, length=99, seed=5, rank=world - 1, world=world)
        resumed.load_state_dict(json.loads(state))
        for batch in batches[i:]:
            assert all(torch.equal(a, b) for a, b in zip(resumed.next_rows(3), batch, strict=True))


def test_ranks_share_out_the_padded_rows_of_one_process(tmp_path: Path, tokenizer: Any) -> None:
    sources = two_files(tmp_path)
    alone = rows_of(stream_of(sources, tokenizer, pack=False, length=9), 6, 10)
    ranks = [rows_of(PaddedStream(sources, tokenizer, length=9, rank=r, world=3), 2, 10) for r in range(3)]
    assert sorted(alone) == sorted(row for rows in ranks for row in rows)


@pytest.mark.parametrize("pack", [True, False])
def test_one_pass_reads_a_small_file_to_its_end_and_no_document_twice(
    tmp_path: Path, tokenizer: Any, pack: bool
) -> None:
    """Ten documents with a batch of eight: a stream that reads ahead would have thrown them all away."""
    documents = [{"text": chr(65 + i) * 3} for i in range(10)]
    said: list[str] = []
    stream = Stream(write(tmp_path / "a.jsonl", documents), tokenizer, length=4)
    batches = list(one_pass(stream, 1000, batch=8, pack=pack, say=said.append))
    text = "".join(tokenizer.decode(row[real]) for ids, mask in batches for row, real in zip(ids, mask, strict=True))
    read = text.split("$")[:-1]
    assert len(read) == len(set(read)) == 10
    assert said == ["the data ends after 40 of the 1000 tokens asked for"]


def test_an_unknown_loss_on_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="expected 'all' or 'completion'"):
        Stream(two_files(tmp_path), tokenizer, length=4, loss_on="replies")


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_reach_the_template_however_they_are_spelled(
    tmp_path: Path, tokenizer: Any, given: str, read: str
) -> None:
    tokenizer.chat_template = TEMPLATE.replace("reasoning_content", read)
    messages = [{"role": "assistant", "content": "4", given: "2 and 2"}]
    path = write(tmp_path / "a.jsonl", [{"messages": messages}])
    assert [tokenizer.decode(ids) for ids in read_documents(path, tokenizer)] == ["<assistant>(2 and 2)4$"]


def test_thoughts_that_the_template_would_drop_are_an_error(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = write(tmp_path / "a.jsonl", [{"messages": [{"role": "assistant", "content": "4", "thinking": "2 and 2"}]}])
    with pytest.raises(ValueError, match=r"reads none of .*`thinking` would be lost"):
        list(read_documents(path, tokenizer))


def test_messages_without_a_chat_template_are_an_error(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    path = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(ValueError, match="chat template"):
        list(read_documents(path, tokenizer))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a", "messages": []}', "only one of them"),
        ('{"body": "a"}', "expected one of `text`"),
        ('{"prompt": "a"}', "`completion` is missing"),
        ('{"text": 3}', "`text` is int"),
        ('{"messages": ["hi"]}', "list of objects"),
        ('["a"]', "got list"),
        ('{"text": "a', "not JSON"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, tokenizer: Any, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"bad\.jsonl:3: .*{message}"):
        list(read_documents(path, tokenizer))
    with pytest.raises(ValueError, match=rf"bad\.jsonl:3: .*{message}"):
        Stream(str(path), tokenizer, length=50).next_batch(1)


def test_empty_documents_are_left_out_and_counted_once(tmp_path: Path, tokenizer: Any, caplog: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": " "}, {"text": "ab"}, {"prompt": "", "completion": ""}])
    stream = Stream(path, tokenizer, length=30)
    assert stream.next_batch(1)[0].tolist() == tokenizer("ab$" * 10)["input_ids"]
    assert [record.getMessage() for record in caplog.records] == [f"{path}: left out 2 empty of 3 documents"]


def test_a_file_of_empty_documents_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": ""}, {"messages": []}])
    with pytest.raises(ValueError, match="all 2 documents are empty"):
        Stream(path, tokenizer, length=4).next_batch(1)
    with pytest.raises(ValueError, match="all 2 documents are empty"):
        list(read_documents(path, tokenizer))


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "half"])
def test_a_weight_that_is_no_positive_number_is_an_error(tmp_path: Path, tokenizer: Any, weight: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match="weight"):
        Stream(f"{path}={weight}", tokenizer, length=4)


def test_a_missing_file_is_an_error_that_names_the_nearest(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path / "train.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=r"trian\.jsonl does not exist.*Nearest: .*train\.jsonl"):
        Stream(str(tmp_path / "trian.jsonl"), tokenizer, length=4)


def test_resuming_with_other_files_or_seed_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    sources = two_files(tmp_path)
    state = Stream(sources, tokenizer, length=4).state_dict()
    with pytest.raises(ValueError, match="seed"):
        Stream(sources, tokenizer, length=4, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="num_documents"):
        Stream(",".join(reversed(sources.split(","))), tokenizer, length=4).load_state_dict(state)
    with pytest.raises(ValueError, match="share"):
        Stream(sources.replace("=3", "=2"), tokenizer, length=4).load_state_dict(state)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_rows_under_their_mask_are_the_documents(side: Any) -> None:
    documents = [[5, EOS], [1, 2, 3, 4, 5, 6, 7, EOS], [EOS, EOS, 9], [8]]  # pad equals eos: only the mask tells
    batches = list(padded_batches(documents, batch=3, length=5, pad_id=EOS, side=side))
    assert [list(ids.shape) for ids, _ in batches] == [[3, 5], [2, 3]]
    rows = [row[real].tolist() for ids, mask in batches for row, real in zip(ids, mask, strict=True)]
    assert rows == [[5, EOS], [1, 2, 3, 4, 5], [6, 7, EOS], [EOS, EOS, 9], [8]]
    edge = 0 if side == "right" else -1
    assert all(mask[:, edge].all() for _, mask in batches)
