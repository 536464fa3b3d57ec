// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_tensor_test.cc: `train --tp T`: the loss of one rank to a tolerance, one
// set of bits for a layout, and its store; what does not divide is refused with the arithmetic. All
// stages and placements are compared in tests/core (EngineTensor), kills in cli_ranks_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace cli_tensor_test {

using ::testing::HasSubstr;

double loss_of(const std::string& bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(std::stoul(bits, nullptr, 16)));
}

class CliTensor : public ::testing::Test {
 protected:
  using Bits = std::map<int, std::string>;

  Bits bits(int steps, const Arguments& more) {
    const std::string store = "store-" + std::to_string(++runs_);
    const Output output = ziggurat(folder_.path(), tiny_train(folder_, store, steps) + more);
    EXPECT_EQ(output.exit_code, 0) << ::testing::PrintToString(more) << output.out << output.err;
    std::filesystem::remove_all(folder_ / store);
    return loss_bits(output.out);
  }
  std::string complaint(const Arguments& more) {
    const Output output = ziggurat(folder_.path(), tiny_train(folder_, "refused", 2) + more);
    EXPECT_NE(output.exit_code, 0) << output.out;
    return output.err;
  }
  static void expect_near(const Bits& its, const Bits& expected, double tolerance) {
    ASSERT_EQ(its.size(), expected.size());
    for (const auto& [step, bits] : expected) {
      const double loss = loss_of(bits);
      EXPECT_NEAR(loss_of(its.at(step)), loss, tolerance * loss) << "step " << step;
    }
  }

  const TemporaryFolder folder_;
  int runs_ = 0;
};

// In fp32 products are cut, and so rounded, at other places, no more: over 30 steps the loss was
// seen to differ by 9e-8, its last bit. In bf16 each rank's part of a layer's output is rounded, to
// one part in 2^9, before they are added: 7e-5 of the loss was seen, in fp16 7e-6.
TEST_F(CliTensor, HasTheLossOfOneRank) {
  constexpr int kSteps = 30;
  const Arguments two{"--nproc", "2", "--tp", "2"};
  const Arguments fp32{"--dtype", "fp32", "--accumulate", "2"};
  const Bits one = bits(kSteps, fp32);
  EXPECT_LT(loss_of(one.at(kSteps)), 0.95 * loss_of(one.at(1)));
  expect_near(bits(kSteps, fp32 + two + Arguments{"--sp"}), one, 1e-6);
  const Arguments bf16{"--accumulate", "2"};
  expect_near(bits(kSteps, bf16 + two), bits(kSteps, bf16), 5e-4);
}

TEST_F(CliTensor, HasTheSameBitsInEveryStagePlacementAndBucketSize) {
  const Arguments four{"--nproc", "4", "--tp", "2", "--accumulate", "1"};
  const Arguments other{"--zero-stage",
                        "3",
                        "--placement",
                        "all=nvme",
                        "--reduce-bucket-size",
                        "1",
                        "--activation-checkpointing",
                        "off",
                        "--device-memory",
                        "16MiB"};
  for (const Arguments& rows : {Arguments{}, Arguments{"--sp"}})
    EXPECT_EQ(bits(4, four + rows), bits(4, four + rows + other));
}

TEST_F(CliTensor, SaysWhoDividesWhatAndWaits) {
  const Output output =
      ziggurat(folder_.path(), tiny_train(folder_, "store", 3) +
                                   Arguments{"--nproc", "4", "--tp", "2", "--zero-stage", "3"});
  EXPECT_THAT(output.out, HasSubstr("2 data-parallel x 2 tensor-parallel ranks, ZeRO stage 3"));
  EXPECT_THAT(output.out, HasSubstr("part 0 of 2 of every layer"));
  EXPECT_THAT(output.out, HasSubstr("waiting: ranks"));
}

// Frozen, the model stays as it began: the parts are the whole's, bit for bit.
// In fp32, where parts compute what the whole does to its last bits, and so draw the same bytes.
TEST_F(CliTensor, IsPutTogetherByExportAndSpeaksWithOneVoice) {
  const auto exported = [&](const std::string& name, const Arguments& more) {
    const Output train = ziggurat(
        folder_.path(),
        tiny_train(folder_, name, 1) +
            Arguments{"--param-groups", "*:frozen", "--zero-stage", "3", "--dtype", "fp32"} + more);
    EXPECT_EQ(train.exit_code, 0) << train.err;
    const std::string file = folder_ / (name + ".safetensors");
    const Output output =
        ziggurat(folder_.path(), {"export", "--store", folder_ / name, "--to", file});
    EXPECT_EQ(output.exit_code, 0) << output.err;
    return contents(file);
  };
  const std::string whole = exported("whole", {});
  EXPECT_EQ(exported("four", {"--nproc", "4", "--tp", "2"}), whole);
  const auto said = [&](const std::string& name) {
    const Output sample = ziggurat(folder_.path(), {"sample", "--store", folder_ / name, "--bytes",
                                                    "70", "--host-memory", "16MiB"});
    EXPECT_EQ(sample.exit_code, 0) << sample.err;
    return sample.out;
  };
  const std::string text = said("whole");
  EXPECT_GT(text.size(), 70u);
  EXPECT_EQ(said("four"), text);
}

TEST_F(CliTensor, RefusesTheStoreOfAnotherDivision) {
  const auto train = [&](const Arguments& more) {
    return ziggurat(folder_.path(), tiny_train(folder_, "store", 2) + more);
  };
  EXPECT_EQ(train({"--nproc", "2", "--tp", "2"}).exit_code, 0);
  const Output data = train({"--nproc", "2"});
  EXPECT_EQ(data.exit_code, 1);
  EXPECT_THAT(data.err, HasSubstr("give --nproc 2 --tp 2, --resume reshard"));
  const Output one = train({});
  EXPECT_EQ(one.exit_code, 1);
  EXPECT_THAT(one.err, HasSubstr("the store was made by 2 ranks, but is opened by 1"));
  EXPECT_EQ(train({"--nproc", "2", "--tp", "2", "--sp"}).exit_code, 0);
}

TEST_F(CliTensor, RefusesWhatDoesNotDivideWithTheArithmetic) {
  EXPECT_THAT(complaint({"--nproc", "3", "--tp", "2"}), HasSubstr("1 would be left over"));
  EXPECT_THAT(complaint({"--nproc", "3", "--tp", "3"}), HasSubstr("heads, which 3 ranks cannot"));
  EXPECT_THAT(complaint({"--nproc", "2", "--sp"}), HasSubstr("give --tp too"));
  EXPECT_THAT(complaint({"--nproc", "2", "--tp", "2", "--sp", "--batch", "1", "--context", "15"}),
              HasSubstr("15 rows, which 2 ranks cannot divide evenly: 1 would be left over"));
}

}  // namespace cli_tensor_test
}  // namespace ziggurat::test
