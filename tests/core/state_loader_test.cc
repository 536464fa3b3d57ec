// SPDX-License-Identifier: Apache-2.0
// tests/core/state_loader_test.cc: state of 8 bits becomes fp32: each value is its code's times its
// block's scale, wherever in its unit the parameter begins; and a model of many small parameters
// loads as one of few does, each at its own cost.
#include "core/checkpoint/state_loader.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "core/checkpoint/piece_source.h"
#include "core/checkpoint/shard_plan.h"
#include "core/sharding/packing.h"
#include "optimizer/eight_bit.h"
#include "optimizer/state_arrays.h"
#include "optimizer/state_values.h"

namespace ziggurat {
namespace state_loader_test {

constexpr std::int64_t kFirst = 300;  // its block ends within the second
constexpr std::int64_t kSecond = 500;
constexpr StateKind kFp32{};
constexpr StateKind kEightBit{OptimizerKind::kAdamW, StateFormat::k8Bit};

ModelSpec model_of(std::size_t units) {
  ModelSpec model{.name = "many", .units = {}, .dtype = DType::kFloat32};
  for (std::size_t u = 0; u < units; ++u) {
    model.units.push_back({.name = fmt::format("unit{}", u),
                           .params = {{.name = fmt::format("first{}", u), .shape = {kFirst}},
                                      {.name = fmt::format("second{}", u), .shape = {kSecond}}}});
  }
  return model;
}

std::uint8_t code_of(std::size_t tensor, std::uint64_t element) {
  return static_cast<std::uint8_t>((element * 7 + tensor) % 256);
}
float scale_of(std::size_t tensor, std::uint64_t block) {
  return 1.0F + static_cast<float>((tensor + 3 * block) % 16);
}

/// Values that are a function of the tensor and the place.
class Numbers final : public StateSource {
 public:
  explicit Numbers(const ModelSpec& model) {
    const ChunkTable table(model, 32, kEightBit);
    const ChunkRuns runs(table);
    content_.model = model.name;
    content_.dtype = model.dtype;
    content_.state = kEightBit;
    content_.units = runs.units();
    content_.tensors = runs.tensors();
  }
  const StateContent& content() const noexcept override { return content_; }
  std::string place() const override { return "numbers"; }
  Task<> read(std::size_t tensor, std::span<const TensorRun> runs,
              std::span<std::byte> array) override {
    const StateTensor& its = content_.tensors[tensor];
    for (const TensorRun& run : runs) {
      for (std::uint64_t i = 0; i < run.count; ++i) {
        if (its.type == TensorType::kU8) {
          array[run.at + i] = std::byte{code_of(tensor, run.first + i)};
          continue;
        }
        const float value = its.array == "master" ? 1.0F : scale_of(tensor, run.first + i);
        std::memcpy(&array[(run.at + i) * sizeof(float)], &value, sizeof(float));
      }
    }
    co_return;
  }
  std::size_t find(const std::string& owner, const std::string& array) const {
    for (std::size_t t = 0; t < content_.tensors.size(); ++t) {
      if (content_.tensors[t].owner == owner && content_.tensors[t].array == array) return t;
    }
    ADD_FAILURE() << array << " of " << owner;
    return 0;
  }

 private:
  StateContent content_;
};

class LoadedNumbers : public ::testing::Test {
 protected:
  std::vector<std::byte> load(StateLoader& loader, const ChunkTable& table, ChunkId id) {
    std::vector<std::byte> record(table.chunk(id).record_bytes());
    reactor_.block_on(loader.load(id, record));
    return record;
  }

  Reactor reactor_;
  WorkerPool workers_{{.threads = 1, .cpus = {}}};
};

TEST_F(LoadedNumbers, AreCodesTimesTheScalesOfTheirUnitsBlocks) {
  const ModelSpec model = model_of(3);
  Numbers source(model);
  const ChunkTable table(model, 32, kFp32);
  StateLoader loader(reactor_, workers_, table, source, {}, 0);
  for (ChunkId id = 0; id < table.chunks().size(); ++id) {
    const std::vector<std::byte> record = load(loader, table, id);
    for (const auto& [array, index, code] :
         {std::tuple{"exp_avg", 1, EightBitCode::kSigned},
          std::tuple{"exp_avg_sq", 2, EightBitCode::kUnsigned}}) {
      std::vector<float> values(kFirst + kSecond);
      read_state_values(kFp32, static_cast<std::size_t>(index), record, values);
      const UnitSpec& unit = model.units[id];
      const std::size_t first = source.find(unit.params[0].name, array);
      const std::size_t second = source.find(unit.params[1].name, array);
      const std::size_t scale = source.find(unit.name, std::string(array) + ".scale");
      for (std::uint64_t i = 0; i < values.size(); ++i) {
        const std::uint8_t its =
            i < kFirst ? code_of(first, i) : code_of(second, i - std::uint64_t{kFirst});
        ASSERT_EQ(values[i], eight_bit_values(code)[its] * scale_of(scale, i / kEightBitBlock))
            << array << " of " << unit.name << ", element " << i;
      }
    }
  }
}

// A scale is of a whole block: what the source does not have of it must be zero under any.
TEST_F(LoadedNumbers, AsTheCodesThatTheyAreHaveZerosBesideThem) {
  const ModelSpec model = model_of(2);
  Numbers source(model);
  const ChunkTable table(model, 32, kEightBit);
  StateLoader loader(reactor_, workers_, table, source, {}, 0);
  for (ChunkId id = 0; id < table.chunks().size(); ++id) {
    const std::vector<std::byte> record = load(loader, table, id);
    for (const std::size_t index : {1, 2}) {
      std::vector<float> values(table.chunk(id).count);
      read_state_values(kEightBit, index, record, values);
      const std::size_t real = table.real_count(id);
      EXPECT_EQ(std::ranges::count(std::span(values).subspan(real), 0.0F), values.size() - real)
          << state_names(kEightBit.optimizer)[index] << " of chunk " << id;
    }
  }
}

TEST_F(LoadedNumbers, OfAFrozenNeighbourBeginAsZerosUnderTheScaleOfItsBlock) {
  const ModelSpec model = model_of(1);
  ModelSpec frozen = model;
  frozen.units[0].params[1].constant = true;
  Numbers source(frozen);
  const ChunkTable table(model, 32, kEightBit);
  StateLoader loader(reactor_, workers_, table, source, {}, 0);
  const std::vector<std::byte> record = load(loader, table, 0);
  std::vector<float> values(kFirst + kSecond);
  read_state_values(kEightBit, 1, record, values);
  EXPECT_EQ(std::ranges::count(std::span(values).subspan(kFirst), 0.0F), kSecond);
}

// Where each parameter walks all others for each of its arrays, no test has the time for this.
TEST_F(LoadedNumbers, OfTenThousandParametersLoadAtTheCostOfEach) {
  const ModelSpec model = model_of(5000);
  Numbers source(model);
  const ChunkTable table(model, 32, kFp32);
  StateLoader loader(reactor_, workers_, table, source, {}, 0);
  for (ChunkId id = 0; id < table.chunks().size(); ++id) load(loader, table, id);
  std::vector<float> last(kFirst + kSecond);
  const std::vector<std::byte> record =
      load(loader, table, static_cast<ChunkId>(table.chunks().size() - 1));
  read_state_values(kFp32, 1, record, last);
  const std::size_t codes = source.find("second4999", "exp_avg");
  const std::size_t scales = source.find("unit4999", "exp_avg.scale");
  EXPECT_EQ(last.back(), eight_bit_values(EightBitCode::kSigned)[code_of(codes, kSecond - 1)] *
                             scale_of(scales, (kFirst + kSecond - 1) / kEightBitBlock));
}

/// Parameters of 300 and of 500 elements, each a unit, as a trainer lends them.
ModelSpec lent_model_of(std::size_t pairs) {
  ModelSpec lent{.name = "many", .units = {}, .dtype = DType::kFloat32};
  for (const UnitSpec& unit : model_of(pairs).units) {
    for (const ParamSpec& param : unit.params) {
      lent.units.push_back({.name = param.name, .params = {param}});
      lent.units.back().params[0].lent = static_cast<ParamId>(lent.units.size() - 1);
    }
  }
  return lent;
}

// From codes of the same blocks, which stay, and from those of other blocks, which are made anew.
TEST_F(LoadedNumbers, ComeIntoSharedRecordsAsIntoThoseOfEachParameter) {
  const ModelSpec lent = lent_model_of(40);
  const ChunkTable alone(lent, 1, kEightBit);
  const ChunkTable shared(packed_model(lent, StateFormat::k8Bit), 1, kEightBit);
  ASSERT_LT(shared.chunks().size(), 10U);
  for (const ModelSpec& from : {lent, model_of(40)}) {
    Numbers source(from);
    StateLoader one(reactor_, workers_, alone, source, {}, 0);
    StateLoader other(reactor_, workers_, shared, source, {}, 0);
    std::size_t found = 0;
    for (ChunkId id = 0; id < shared.chunks().size(); ++id) {
      const std::vector<std::byte> record = load(other, shared, id);
      for (const ParamRun& run : shared.param_runs(id)) {
        const std::vector<std::byte> own = load(one, alone, run.lent);
        for (std::size_t a = 0; a < state_arrays(kEightBit).size(); ++a) {
          const StateArray array = state_arrays(kEightBit)[a];
          std::vector<std::byte> its((run.count + array.block - 1) / array.block *
                                     array.element_bytes());
          std::vector<std::byte> wanted(its.size());
          read_state_array(shared.state(id), a, record, run.begin, its);
          read_state_array(kEightBit, a, own, run.first, wanted);
          ASSERT_EQ(its, wanted) << array.name << " of parameter " << run.lent;
        }
        found += run.count;
      }
    }
    EXPECT_EQ(found, lent.count());
  }
}

// Whoever reads a store with such records finds the tensors that each parameter has alone.
TEST_F(LoadedNumbers, HaveTheTensorsOfEachParameterInSharedRecords) {
  const ModelSpec lent = lent_model_of(3);
  const ChunkTable alone(lent, 1, kEightBit);
  const ChunkTable shared(packed_model(lent, StateFormat::k8Bit), 1, kEightBit);
  const auto by_name = [](const ChunkTable& table) {
    std::vector<StateTensor> tensors = ChunkRuns(table).tensors();
    std::ranges::sort(tensors, {}, &StateTensor::name);
    return tensors;
  };
  EXPECT_EQ(by_name(shared), by_name(alone));
  const auto units = [](const ChunkTable& table) { return ChunkRuns(table).units(); };
  EXPECT_EQ(units(shared), units(alone));
  // A rank that saves them writes each element of each tensor once.
  const ChunkRuns runs(shared);
  std::vector<std::uint64_t> written(runs.tensors().size());
  for (const StatePiece& piece : plan_shards(shared, runs, {}).pieces)
    written[piece.tensor] += piece.box.count();
  for (std::size_t t = 0; t < written.size(); ++t)
    EXPECT_EQ(written[t], runs.tensors()[t].count()) << runs.tensors()[t].name;
}

/// A trainer's pieces, each a whole parameter under a name of its own.
TEST_F(LoadedNumbers, ComeUnderTheNamesOfThePieces) {
  const ModelSpec model = model_of(2);
  Numbers source(model);
  std::vector<PieceSource::Param> params;
  for (const UnitSpec& unit : model.units) {
    for (const ParamSpec& param : unit.params) {
      params.push_back(
          {.name = "own." + param.name,
           .shape = param.shape,
           .part = {.name = param.name, .shape = param.shape, .boxes = {whole_box(param.shape)}}});
    }
  }
  const PieceSource pieces(source, params, {}, {});
  std::size_t arrays = 0;
  for (const StateTensor& tensor : pieces.content().tensors) {
    if (tensor.array.ends_with(".scale")) continue;
    ++arrays;
    EXPECT_TRUE(tensor.owner.starts_with("own.")) << tensor.name;
  }
  EXPECT_EQ(arrays, 4U * 3U);
}

}  // namespace state_loader_test
}  // namespace ziggurat
