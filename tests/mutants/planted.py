# SPDX-License-Identifier: Apache-2.0
"""tests/mutants/planted.py: the mistakes that run.py plants, by what they take away."""

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    about: str
    file: str
    old: str  # once in the file
    new: str


MUTANTS = [
    Mutant(
        "early_write",
        "records are written before the generation before is durable",
        "core/schedule/optimizer/optimizer_chunk.cc",
        (
            "  if (pass.previous) co_await pass.previous->done.wait();\n"
            "  if (parts_.watch != nullptr)\n"
            "    co_await parts_.watch->before_write"
        ),
        (
            "  if (parts_.watch != nullptr)\n"
            "    co_await parts_.watch->before_write"
        ),
    ),
    Mutant(
        "no_gradient",
        "a chunk is updated without its gradient",
        "core/schedule/optimizer/optimizer_chunk.cc",
        "    co_await arrived.wait();\n",
        "",
    ),
    Mutant(
        "alone_durable",
        "a rank takes for durable everywhere what it has sealed itself",
        "core/schedule/optimizer/optimizer_seal.cc",
        "co_await parts_.ranks.min(stored);",
        "stored;",
    ),
    Mutant(
        "unreduced",
        "a gradient goes home before the ranks have summed it",
        "core/schedule/gradients/gradient_flow.cc",
        "    co_await reduced->wait();\n",
        "",
    ),
    Mutant(
        "bucket_early",
        "a bucket is given back before its sum is taken in",
        "core/schedule/gradients/gradient_reducer.cc",
        (
            "  co_await std::move(sent);\n"
            "  if (quantized_)"
        ),
        (
            "  co_await std::move(sent);\n"
            "  buffers_.give_back(bucket.buffer);\n"
            "  if (quantized_)"
        ),
    ),
    Mutant(
        "turns",
        "ranks gather buckets in the order in which their sums come",
        "core/schedule/gradients/gradient_reducer.cc",
        (
            "Task<> GradientReducer::gather(const Bucket& bucket) {\n"
            "  co_await turns_.wait(bucket.number);\n"
        ),
        "Task<> GradientReducer::gather(const Bucket& bucket) {\n",
    ),
    Mutant(
        "piece_early",
        "a piece's buffer is given back before it is on the device",
        "core/schedule/params/unit_gather.cc",
        (
            "  co_await bring(*flight, piece);\n"
            "  staging_->give_back(piece.buffer);\n"
            "  flight->missing_bytes"
        ),
        (
            "  staging_->give_back(piece.buffer);\n"
            "  co_await bring(*flight, piece);\n"
            "  flight->missing_bytes"
        ),
    ),
    Mutant(
        "half_lease",
        "a lease takes but a part of its bytes from the free memory",
        "tiers/pool/arena.cc",
        "  const FreeRange taken{offset_bytes, round_up(size_bytes, alignment_bytes_)};\n",
        "  const FreeRange taken{offset_bytes, round_up((size_bytes + 1) / 2, alignment_bytes_)};\n",
    ),
    Mutant(
        "two_in_one_place",
        "a reserve's leases lie where those of the general region do",
        "tiers/pool/pinned_pool.cc",
        "  std::byte* const data = mapping_.bytes().data() + from.base_offset_bytes + *offset;\n",
        "  std::byte* const data = mapping_.bytes().data() + *offset;\n",
    ),
    Mutant(
        "offer_stays",
        "memory can be taken back after its offer was withdrawn",
        "tiers/pool/pinned_pool.cc",
        "  ended = end_offer(id);\n",
        "",
    ),
    Mutant(
        "superblock_unsynced",
        "a generation is called durable before its superblock is",
        "tiers/store/state_store_commit.cc",
        "  if (layout.slots == 2) co_await sync();\n",
        "",
    ),
    Mutant(
        "one_superblock",
        "every generation's superblock overwrites the one before",
        "tiers/store/store_layout.cc",
        "file_bytes - 2 * kRegionBytes) + parity * kRegionBytes;",
        "file_bytes - 2 * kRegionBytes) + 0 * parity * kRegionBytes;",
    ),
    Mutant(
        "one_table",
        "every generation's table overwrites the one before",
        "tiers/store/state_store_commit.cc",
        "  next.table_offset_bytes = layout.table_offset[parity];\n",
        "  next.table_offset_bytes = layout.table_offset[0];\n",
    ),
    Mutant(
        "own_newest",
        "each rank goes on from the newest generation that it has itself",
        "tiers/store/store_recovery.cc",
        "    if (lowest != highest) {\n",
        "    if (false) {\n",
    ),
    Mutant(
        "unsealed",
        "a generation is over before it is durable",
        "core/schedule/optimizer/optimizer_seal.cc",
        (
            "  if (pass->seals) {\n"
            "    co_await pass->blob_given.wait();\n"
        ),
        (
            "  pass->done.set();\n"
            "  if (pass->seals) {\n"
            "    co_await pass->blob_given.wait();\n"
        ),
    ),
    Mutant(
        "sealed_too_soon",
        "a generation is sealed while a record of it is being written",
        "core/schedule/optimizer/optimizer_sweep.cc",
        "  return --pass.records_left == 0;\n",
        "  return --pass.records_left == 1;\n",
    ),
]
