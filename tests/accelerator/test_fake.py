"""The fake itself: it must be as strict as a real accelerator, or the other tests here prove nothing."""

import pytest
import torch


def test_it_is_the_accelerator_of_this_process():
    assert torch.accelerator.current_accelerator().type == "fake"
    assert torch.accelerator.device_count() == torch.fake.device_count() == 4
    with pytest.raises(RuntimeError, match="fake:4 does not exist"):
        torch.ones(2, device="fake:4")


@pytest.mark.parametrize("other", ["fake:1", "cpu"])
@pytest.mark.parametrize("operation", [torch.add, torch.mul, torch.equal, lambda x, y: torch.cat([x, y]), torch.dot])
def test_operations_on_two_devices_are_errors(operation, other, really_equal):
    operation = really_equal if operation is torch.equal else operation
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        operation(torch.ones(3, device="fake:0"), torch.ones(3, device=other))
    operation(torch.ones(3, device="fake:2"), torch.ones(3, device="fake:2"))


def test_a_number_of_the_cpu_is_taken():
    assert (torch.ones(2, device="fake:1") * torch.tensor(3.0, device="cpu")).tolist() == [3, 3]


def test_a_copy_to_the_host_that_does_not_block_is_there_when_somebody_waited():
    x = torch.arange(4.0, device="fake:1")
    early = x.to("cpu", non_blocking=True)
    x.zero_()
    assert early.tolist() != [0, 1, 2, 3]
    torch.accelerator.current_stream("fake:1").synchronize()
    assert early.tolist() == [0, 1, 2, 3]
    assert x.to("cpu").tolist() == [0] * 4


def test_each_device_has_a_stream_and_each_thread_its_device():
    stream = torch.Stream("fake:2")
    with stream:
        assert torch.accelerator.current_stream("fake:2") == stream
        assert torch.accelerator.current_stream("fake:1") != stream
        assert torch.accelerator.current_device_index() == 2
    assert torch.accelerator.current_stream("fake:2") != stream
    assert torch.accelerator.current_device_index() == 0


def test_each_device_has_random_numbers_of_its_own():
    torch.manual_seed(1)
    first = [torch.rand(3, device=f"fake:{index}").tolist() for index in range(4)]
    assert first == [first[0]] * 4, "one seed for all"
    state = torch.fake.get_rng_state("fake:1")
    after = torch.rand(3, device="fake:1")
    torch.rand(3, device="fake:2")
    torch.fake.set_rng_state(state, "fake:1")
    assert torch.rand(3, device="fake:1").tolist() == after.tolist() != first[1]


def test_a_generator_belongs_to_its_device():
    generator = torch.Generator("fake:1").manual_seed(3)
    drawn = torch.rand(3, device="fake:1", generator=generator).tolist()
    assert torch.rand(3, device="fake:1", generator=generator.manual_seed(3)).tolist() == drawn
    with pytest.raises(RuntimeError, match=r"Expected a.*generator"):
        torch.rand(3, device="fake:2", generator=generator)


def test_sparse_tensors():
    one = torch.eye(3, device="fake:1").to_sparse()
    other = torch.ones(3, 3, device="fake:1").to_sparse()
    total = one + other
    assert total.device == one.to("fake:2").to(one.device).device == torch.device("fake:1")
    assert total.to_dense().tolist() == (torch.eye(3, device="cpu") + 1).tolist()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        one + other.to("fake:0")
