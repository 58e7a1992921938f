import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.args import ModelArgs
from model.errors import InputError
from model.evaluation.windows import Window, check_windows, plan_windows


@given(length=st.integers(0, 400), window=st.integers(2, 90), data=st.data())
def test_every_token_but_the_first_is_scored_once_with_a_token_before_it(length, window, data):
    stride = data.draw(st.integers(1, window - 1))
    windows = plan_windows(length, window, stride)
    assert [token for w in windows for token in range(w.scored, w.end)] == list(range(1, length))
    assert all(w.start < w.scored and w.end - w.start <= window for w in windows)
    assert all(w.tokens > 0 for w in windows)
    assert [w.start for w in windows] == list(range(0, len(windows) * stride, stride))


def test_the_windows_of_tiny_v3_s_readme():
    windows = plan_windows(3073, 512, 511)
    assert len(windows) == 7
    assert windows[0] == Window(0, 512, 1)
    assert windows[1] == Window(511, 1023, 512)
    assert windows[-1] == Window(3066, 3073, 3067)


def test_a_smaller_stride_gives_context_to_the_tokens_that_are_new():
    assert plan_windows(12, 6, 2) == [Window(0, 6, 1), Window(2, 8, 6), Window(4, 10, 8), Window(6, 12, 10)]


def test_defaults_are_the_context_and_one_less():
    assert check_windows(None, None, ModelArgs(max_seq_len=512)) == (512, 511)
    assert check_windows(None, 5, ModelArgs(max_seq_len=16384)) == (2048, 5)


@pytest.mark.parametrize(
    ("window", "stride", "said"),
    [
        (513, None, "window 513: takes 2 to 512"),
        (1, None, "window 1: takes 2 to 512"),
        (40, 40, "stride 40: takes 1 to 39"),
    ],
)
def test_what_leaves_tokens_out_is_refused(window, stride, said):
    with pytest.raises(InputError, match=said):
        check_windows(window, stride, ModelArgs(max_seq_len=512))
