"""What is taken out of the stacks of a rank."""

from disttrain_api.stacks import MAX_CALLS, MAX_STACK_BYTES, STOPPED, main_thread


def test_the_main_thread_is_cut_out_of_what_faulthandler_writes() -> None:
    other = 'Thread 0x2 (most recent call first):\n  File "/b.py", line 1 in other\n'
    main = "Current thread 0x1 (most recent call first):\n" + "".join(
        f'  File "/a.py", line {line} in f\n' for line in range(100)
    )
    for text in (f"{other}\n{main}", f"{main}\n{other}"):
        for ranks, calls in ((1, MAX_CALLS), (8, MAX_CALLS), (64, 16), (256, 4), (0, MAX_CALLS)):
            assert main_thread(text, ranks) == "\n".join(main.splitlines()[: 1 + calls]), ranks
    assert main_thread(STOPPED, 8) == STOPPED
    assert len(main_thread("x" * 10**6, 8)) == len(main_thread(main.replace("f", "f" * 10**5), 8)) == MAX_STACK_BYTES
