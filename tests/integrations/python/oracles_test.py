# SPDX-License-Identifier: Apache-2.0
"""bench/oracles.py over a few measured rows of others: predictions stay where they were when constants were frozen.

Run by pytest; as a script it exits with 77 where pytest is missing. The rows are PrimeIntellect-ai/prime-rl's (benchmarks,
commit 559b4477) and VIA-Research/vTrain's (data, commit f8dda84).
"""

import re
import sys
from pathlib import Path

try:
    import pytest
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import oracles  # noqa: E402

MEMORY = """\
machine,gpus,model,kind,lora_rank,sequence,micro_batches,activations,attention,fits,step_s_mean,step_s_std,peak_gib,mfu_percent
1xh100,1,Qwen/Qwen3-0.6B,sft,full,16384,2,Recompute,flash_attention_3,yes,1.282,0.0006,52.84,23.74
1xh100,1,Qwen/Qwen3-4B-Instruct-2507,rl,16,65536,2,Offload,flash_attention_3,yes,32.44,0.03856,31.06,36.28
8xh100,8,Qwen/Qwen3-4B-Instruct-2507,rl,full,16384,2,Recompute,flash_attention_3,yes,4.688,0.0909,17.1,13.9
8xh200,8,PrimeIntellect/INTELLECT-3,rl,16,65536,2,Offload,flash_attention_3,yes,107.5,0.04386,128.8,25.07
8xh200,8,Qwen/Qwen3-30B-A3B-Instruct-2507,rl,full,65536,2,Recompute,flash_attention_3,yes,42.89,0.5559,105.4,15.4
8xb200,8,somebody/else,rl,16,65536,2,Offload,flash_attention_2,yes,1,1,1,1
8xb200,8,Qwen/Qwen3-235B-A22B-Instruct-2507,rl,16,65536,2,Offload,flash_attention_2,out of memory,,,,
"""
ONE_NODE = """\
gpus,global_batch,micro_batch,hidden,heads,layers,sequence,tensor_parallel,data_parallel,pipeline_parallel,iteration_ms
2,16,8,1024,16,24,1024,1,1,2,372.160408
4,16,4,2048,16,24,1024,1,2,2,410.490577
8,4,1,1024,16,16,1024,1,2,4,77.216619
2,32,8,2048,16,20,1024,1,2,1,826.261727
"""
MANY_NODES = """\
parameters_billion,gpus,global_batch,micro_batch,hidden,heads,layers,sequence,tensor_parallel,data_parallel,pipeline_parallel,iteration_ms
3.6,64,512,8,3072,32,30,2048,2,32,1,3975.2
18.4,256,1024,8,6144,48,40,2048,4,32,2,10856.3
175,512,1536,3,12288,96,96,2048,8,4,16,55677.5
"""


def said_of(rows, tmp_path, capsys, monkeypatch, *flags):
    file = tmp_path / "rows.csv"
    file.write_text(rows)
    monkeypatch.setattr(sys, "argv", ["oracles.py", str(file), *flags])
    assert oracles.main() == 0
    return capsys.readouterr().out


def worst(said):
    return float(re.search(r"worst ([0-9.]+)%", said).group(1))


def test_memory_of_one_gpu_and_of_eight(tmp_path, capsys, monkeypatch):
    said = said_of(MEMORY, tmp_path, capsys, monkeypatch, "--rows")
    assert "memory: 5 facts" in said  # the row that ran out of memory has no peak
    assert "left out: 1 rows of somebody/else" in said
    assert worst(said) < 4
    assert ": 0 under" in said
    assert "0.95 of the peak: 0 of 5 accepted" in said
    assert "1.20 of the peak: 5 of 5 accepted" in said
    assert "out of memory: 1 of 1 refused" in said


@pytest.mark.parametrize(("rows", "percent"), [(ONE_NODE, 6), (MANY_NODES, 12)])
def test_time_on_one_node_and_on_many(rows, percent, tmp_path, capsys, monkeypatch):
    assert worst(said_of(rows, tmp_path, capsys, monkeypatch)) < percent


def test_rows_without_a_number_are_left_out_and_columns_may_lack(tmp_path, capsys, monkeypatch):
    failed = ONE_NODE.replace("372.160408", "failed").replace("410.490577", "")
    said = said_of(failed, tmp_path, capsys, monkeypatch, "--regression")
    assert "left out: 2 rows without a number in iteration_ms" in said
    assert "time: 2 facts" in said
    lines = [line.split(",") for line in MEMORY.splitlines()]
    said = said_of("\n".join(",".join(line[1:10] + line[12:]) for line in lines), tmp_path, capsys, monkeypatch)
    assert "memory: 5 facts" in said
    assert "time, without a bar: no facts" in said


def test_every_row_that_is_far_off_is_named(tmp_path, capsys, monkeypatch):
    said = said_of(ONE_NODE.replace("372.160408", "200"), tmp_path, capsys, monkeypatch)
    assert "measured 200 ms" in said
    assert "measured 410 ms" not in said


def test_a_column_that_is_needed_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "rows.csv").write_text(ONE_NODE.replace("heads", "eyes"))
    monkeypatch.setattr(sys, "argv", ["oracles.py", str(tmp_path / "rows.csv")])
    assert oracles.main() == 1
    assert "no heads" in capsys.readouterr().err


def test_a_file_of_something_else_is_refused(tmp_path, capsys, monkeypatch):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr(sys, "argv", ["oracles.py", str(tmp_path / "rows.csv")])
    assert oracles.main() == 1
    assert "neither column" in capsys.readouterr().err


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
