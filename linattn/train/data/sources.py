"""The public datasets, as published: their files, checksums, addresses and licences.

A checksum belongs to the bytes of an original file, unpacked. Whatever form it was found in (unpacked, compressed,
inside an archive, re-encoded without loss), it is those bytes that are compared.
"""

from __future__ import annotations

from typing import NamedTuple


class Download(NamedTuple):
    path: str  # where it is put, below the data folder
    sha256: str
    urls: tuple[str, ...]  # tried in turn


class Original(NamedTuple):
    sha256: str  # of the unpacked file
    download: Download  # in which it comes


class Source(NamedTuple):
    name: str
    licence: str
    folders: tuple[str, ...]  # where its files may lie, below the data folder
    originals: dict[str, Original]


def _mnist(file: str, sha256: str, packed_sha256: str) -> dict[str, Original]:
    hosts = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")
    urls = tuple(f"{host}/{file}.gz" for host in hosts)
    return {file: Original(sha256, Download(f"mnist/{file}.gz", packed_sha256, urls))}


MNIST = Source(
    "mnist",
    "CC BY-SA 3.0 (Y. LeCun, C. Cortes)",
    ("mnist", "MNIST/raw", "."),
    {
        **_mnist(
            "train-images-idx3-ubyte",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        **_mnist(
            "train-labels-idx1-ubyte",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        **_mnist(
            "t10k-images-idx3-ubyte",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        **_mnist(
            "t10k-labels-idx1-ubyte",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    },
)

CIFAR10_ARCHIVE = "cifar-10-binary.tar.gz"
_CIFAR10_DOWNLOAD = Download(
    f"cifar10/{CIFAR10_ARCHIVE}",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    (f"https://www.cs.toronto.edu/~kriz/{CIFAR10_ARCHIVE}",),
)
CIFAR10 = Source(
    "cifar10",
    "no formal licence; cite A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    ("cifar10/cifar-10-batches-bin", "cifar-10-batches-bin", "cifar10", "."),
    {
        file: Original(sha256, _CIFAR10_DOWNLOAD)
        for file, sha256 in {
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        }.items()
    },
)

_ENWIK8_DOWNLOAD = Download(
    "enwik8/enwik8.zip",
    "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    ("https://mattmahoney.net/dc/enwik8.zip", "http://mattmahoney.net/dc/enwik8.zip"),
)
ENWIK8 = Source(
    "enwik8",
    "CC BY-SA 3.0 and GFDL (the authors of Wikipedia)",
    ("enwik8", "."),
    {"enwik8": Original("2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8", _ENWIK8_DOWNLOAD)},
)

_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_SHAKESPEARE_DOWNLOAD = Download(
    "tinyshakespeare/tinyshakespeare.txt",
    _SHAKESPEARE_SHA256,
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
)
TINYSHAKESPEARE = Source(
    "tinyshakespeare",
    "public domain (W. Shakespeare; collected by A. Karpathy)",
    ("tinyshakespeare", "text_small", "."),
    {"tinyshakespeare.txt": Original(_SHAKESPEARE_SHA256, _SHAKESPEARE_DOWNLOAD)},
)
