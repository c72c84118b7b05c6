"""What the tests of sources share: comparing what a source gives with what it should give."""

from weightvc.sources.base import ReadsRuns, Source
from weightvc.sources.header import read_header


def content(source: Source) -> dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every tensor, by component and name."""
    result = {}
    for index, tensor in enumerate(source.tensors):
        data = bytes(source.read(index, 0, tensor.nbytes))
        assert len(data) == tensor.nbytes
        result[tensor.component, tensor.name] = (tensor.dtype, tensor.shape, data)
    if isinstance(source, ReadsRuns):
        joined = b"".join([data for _, _, data in result.values()])
        assert bytes(source.read_run(0, len(source.tensors))) == joined
    keys = [(tensor.component, tensor.name) for tensor in source.tensors]
    assert keys == sorted(set(keys))
    return result


def files(source: Source) -> dict[str, bytes]:
    """The checkpoint's files, rebuilt from the layout and the tensors."""
    assert source.layout is not None
    tensors = {(tensor.component, tensor.name): index for index, tensor in enumerate(source.tensors)}
    result = {}
    for file in source.layout.files:
        data = bytearray(file.size)
        data[: len(file.content)] = file.content
        if file.weights:
            component = file.path.rpartition("/")[0]
            for name, _, _, begin, end in read_header(lambda a, b, f=file: f.content[a:b], file.size).tensors:
                index = tensors[component, name]
                assert end - begin == source.tensors[index].nbytes
                data[begin:end] = source.read(index, 0, end - begin)
        assert len(data) == file.size
        result[file.path] = bytes(data)
    assert list(result) == sorted(result)
    return result
