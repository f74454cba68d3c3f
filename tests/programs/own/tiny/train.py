"""The smallest program: what the harness itself is tested with."""

import torch

DATA = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))

model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(DATA, batch_size=4, shuffle=True)

for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
