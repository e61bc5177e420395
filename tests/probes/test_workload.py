from provisioner.probes.model import Workload
from provisioner.probes.workload import Calibration, Corpus, Message, ask_about, write_request


def test_the_same_seed_and_number_give_the_same_document() -> None:
    assert Corpus(seed=5).write_document(3, 200) == Corpus(seed=5).write_document(3, 200)


def test_documents_share_no_opening_with_others_of_any_seed() -> None:
    openings = {Corpus(seed=seed).write_document(number, 20)[:24] for seed in range(20) for number in range(20)}
    assert len(openings) == 400


def test_a_document_has_about_as_many_words_as_asked() -> None:
    for words in (12, 100, 5000):
        count = len(Corpus(seed=1).write_document(1, words).split())
        assert words <= count <= words + 15


def test_calibration_finds_the_words_for_a_number_of_tokens() -> None:
    calibration = Calibration.from_samples((60, 60 * 3 // 2 + 40), (240, 240 * 3 // 2 + 40))
    assert calibration == Calibration(fixed=40.0, per_word=1.5)
    assert calibration.words_for(6040) == 4000
    assert calibration.words_for(1) == 12


def test_the_two_workloads_ask_for_different_text() -> None:
    asked = {workload: ask_about("Doc.", workload).content for workload in Workload}
    assert all(text.startswith("Doc.\n\n") for text in asked.values())
    assert "JSON" in asked[Workload.STRUCTURED]
    assert "JSON" not in asked[Workload.PROSE]


def test_a_request_asks_for_its_usage_and_takes_fields_of_the_server() -> None:
    made = write_request(
        "m", (Message(role="user", content="q"),), tokens=7, temperature=0.7, extra={"ignore_eos": True}
    )
    assert made == {
        "model": "m",
        "messages": [{"role": "user", "content": "q"}],
        "max_tokens": 7,
        "temperature": 0.7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
