"""plain/resnet.py with kfuse: python resnet.py FOLDER, or kfuse-run --workers 2 resnet.py FOLDER"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import kfuse as kf

BATCH, EPOCHS = 64, 2


class Images(Dataset):
    def __init__(self, folder):
        self.classes = sorted(p.name for p in Path(folder).iterdir() if p.is_dir())
        self.files = [(f, k) for k, name in enumerate(self.classes) for f in sorted(Path(folder, name).iterdir())]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file, label = self.files[index]
        pixels = np.asarray(Image.open(file).convert("RGB").resize((32, 32)), dtype=np.float32)
        return torch.from_numpy(pixels / 128 - 1).permute(2, 0, 1).contiguous(), label


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


def resnet(classes):
    layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    for inputs, outputs, stride in [(8, 8, 1), (8, 16, 2), (16, 32, 2), (32, 64, 2)]:
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def main(folder):
    torch.manual_seed(0)
    data, losses = Images(folder), []
    model = resnet(len(data.classes))
    opt = kf.FusedSGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for step in kf.DataLoader(model, data, opt, batch_size=BATCH, micro_batch=BATCH // kf.size(), epochs=EPOCHS):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in main(sys.argv[1])))
