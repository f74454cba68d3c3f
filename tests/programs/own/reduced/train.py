"""Averages its gradients itself, in the ways that scripts have."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def by_data(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.data)
        parameter.grad.data /= world


def by_gradient(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(world)


def later(model):
    handles = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for handle, parameter in zip(handles, model.parameters(), strict=True):
        handle.wait()
        parameter.grad /= world


def in_one(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch._utils._flatten_dense_tensors(gradients)
    dist.all_reduce(flat)
    flat /= world
    averages = torch._utils._unflatten_dense_tensors(flat, gradients)
    for own, average in zip(gradients, averages, strict=True):
        own.copy_(average)


for average in (by_data, by_gradient, later, in_one):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        average(model)
        optimizer.step()
    print(average.__name__, "done")
