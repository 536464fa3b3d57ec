// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx_rules_test.cc: instructions one by one, where the PTX ISA says what C++
// does not: NaN, saturation, conversion out of range, shuffles of a segment, refusals.
#include <gmock/gmock.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "base/error.h"
#include "tests/cuda_double/machine.h"
#include "tests/cuda_double/ptx/decode.h"
#include "tests/cuda_double/ptx/parse.h"
#include "tests/cuda_double/ptx/run.h"

namespace ziggurat::cuda_double::ptx {
namespace {

using testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::bit_cast<double>(0x7ff8000000001234u);

std::uint64_t bits(float value) { return std::bit_cast<std::uint32_t>(value); }
std::uint64_t bits(double value) { return std::bit_cast<std::uint64_t>(value); }

/// A kernel of one thread: `body` has its inputs in %rd1, %rd2 and %rd3 (the low bits also in %r1,
/// %f1, %h1, %d1, ...) and leaves its result in %rd9.
std::string program(const std::string& body) {
  return ".version 9.0\n.target sm_80\n.address_size 64\n"
         ".visible .entry k(.param .u64 k_out, .param .u64 k_a, .param .u64 k_b, .param .u64 "
         "k_c)\n{\n"
         ".reg .pred %p<4>; .reg .b16 %h<10>; .reg .b32 %r<10>; .reg .f32 %f<10>;\n"
         ".reg .b64 %rd<12>; .reg .f64 %d<10>;\n"
         "ld.param.u64 %rd10, [k_out]; ld.param.u64 %rd1, [k_a]; ld.param.u64 %rd2, [k_b];\n"
         "ld.param.u64 %rd3, [k_c]; mov.u64 %rd9, 0;\n"
         "cvt.u32.u64 %r1, %rd1; cvt.u32.u64 %r2, %rd2; cvt.u32.u64 %r3, %rd3;\n"
         "mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b64 %d1, %rd1; mov.b64 %d2, %rd2;\n"
         "cvt.u16.u64 %h1, %rd1; mov.u32 %r9, 0;\n" +
         body + "\nmov.u32 %r8, %tid.x; mul.wide.u32 %rd8, %r8, 8; add.s64 %rd11, %rd10, %rd8;\n" +
         "st.global.u64 [%rd11], %rd9;\nret;\n}\n";
}

class Ptx : public testing::Test {
 protected:
  Ptx() { machine().reset(1, Options()); }

  std::vector<std::uint64_t> run_threads(const std::string& body, unsigned threads,
                                         std::uint64_t a = 0, std::uint64_t b = 0,
                                         std::uint64_t c = 0) {
    const Text text = parse(program(body));
    const Kernel kernel = decode(text.kernels.at(0), text.shared, {});
    DeviceState& device = *machine().devices[0];
    Allocation* out = device.memory.allocate(8 * threads);
    const std::uint64_t parameters[4] = {out->range.begin, a, b, c};
    GlobalMemory memory(machine(), device);
    run(kernel, {dim3(1), dim3(threads), 0, std::as_bytes(std::span(parameters)), 5, 1000000},
        memory);
    std::vector<std::uint64_t> result(threads);
    std::memcpy(result.data(), device.memory.bytes(out->range.begin), 8 * threads);
    device.memory.release(*out);
    return result;
  }
  std::uint64_t run_one(const std::string& body, std::uint64_t a = 0, std::uint64_t b = 0,
                        std::uint64_t c = 0) {
    return run_threads(body, 1, a, b, c)[0];
  }
  /// Runs `op` over floats.
  std::uint64_t float_result(const std::string& op, float a, float b = 0) {
    return run_one(op + " mov.b32 %r9, %f9; cvt.u64.u32 %rd9, %r9;", bits(a), bits(b));
  }
};

TEST_F(Ptx, a_nan_of_single_precision_is_canonical) {
  const float nan = std::bit_cast<float>(0x7fa12345u);
  for (const char* op : {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "add.f32"}) {
    EXPECT_EQ(float_result(std::string(op) + " %f9, %f1, %f2;", nan, 1), 0x7fffffffu) << op;
    EXPECT_EQ(float_result(std::string(op) + " %f9, %f1, %f2;", 2, -nan), 0x7fffffffu) << op;
  }
  const auto infinity = static_cast<float>(kInfinity);
  EXPECT_EQ(float_result("sub.rn.f32 %f9, %f1, %f2;", infinity, infinity), 0x7fffffffu);
  EXPECT_EQ(float_result("sqrt.rn.f32 %f9, %f1;", -1), 0x7fffffffu);
  EXPECT_EQ(float_result("fma.rn.f32 %f9, %f1, %f2, %f2;", nan, 1), 0x7fffffffu);
  EXPECT_NE(float_result("neg.f32 %f9, %f1;", nan), bits(-nan)) << "unspecified, so not the like";
}

TEST_F(Ptx, min_and_max_take_the_number_and_order_zeros) {
  const float nan = std::bit_cast<float>(0xffc00001u);
  EXPECT_EQ(float_result("min.f32 %f9, %f1, %f2;", nan, 3), bits(3.0f));
  EXPECT_EQ(float_result("max.f32 %f9, %f1, %f2;", 3, nan), bits(3.0f));
  EXPECT_EQ(float_result("max.f32 %f9, %f1, %f2;", nan, nan), 0x7fffffffu);
  EXPECT_EQ(float_result("min.f32 %f9, %f1, %f2;", 0.0f, -0.0f), bits(-0.0f));
  EXPECT_EQ(float_result("max.f32 %f9, %f1, %f2;", -0.0f, 0.0f), bits(0.0f));
  EXPECT_EQ(float_result("max.NaN.f32 %f9, %f1, %f2;", nan, 3), 0x7fffffffu);
}

TEST_F(Ptx, rounding_modes_round) {
  const float tiny = 0x1p-30f;
  EXPECT_EQ(float_result("add.rn.f32 %f9, %f1, %f2;", 1, tiny), bits(1.0f));
  EXPECT_EQ(float_result("add.rp.f32 %f9, %f1, %f2;", 1, tiny), bits(std::nextafter(1.0f, 2.0f)));
  EXPECT_EQ(float_result("add.rm.f32 %f9, %f1, %f2;", 1, -tiny), bits(std::nextafter(1.0f, 0.0f)));
  EXPECT_EQ(float_result("add.rz.f32 %f9, %f1, %f2;", -1, tiny), bits(std::nextafter(-1.0f, 0.0f)));
  EXPECT_EQ(float_result("mul.rn.f32 %f9, %f1, %f2;", 0x1p-126f, 0.5f), 0x00400000u) << "denormal";
}

TEST_F(Ptx, floats_out_of_range_are_clamped_to_integers) {
  const auto convert = [&](const char* type, double value) {
    const bool wide = type[1] == '6';
    return run_one(fmt::format("cvt.rzi.{}.f64 {}, %d1; {}", type, wide ? "%rd9" : "%r9",
                               wide ? "" : "cvt.u64.u32 %rd9, %r9;"),
                   bits(value));
  };
  EXPECT_EQ(convert("s32", 3e9), 0x7fffffffu);
  EXPECT_EQ(convert("s32", -3e9), 0x80000000u);
  EXPECT_EQ(convert("u32", -1.5), 0u);
  EXPECT_EQ(convert("u32", kInfinity), 0xffffffffu);
  EXPECT_EQ(convert("u64", 1e30), ~0ull);
  EXPECT_EQ(convert("s64", -kInfinity), 1ull << 63);
  EXPECT_EQ(convert("s64", kNan), 1ull << 63);
  EXPECT_EQ(convert("s32", kNan), 0x80000000u) << "from .f64";
  EXPECT_EQ(run_one("cvt.rzi.s32.f32 %r9, %f1; cvt.u64.u32 %rd9, %r9;", 0x7fc00000), 0u);
  EXPECT_EQ(run_one("cvt.rni.s32.f32 %r9, %f1; cvt.u64.u32 %rd9, %r9;", bits(2.5f)), 2u);
  EXPECT_EQ(run_one("cvt.rpi.s32.f32 %r9, %f1; cvt.u64.u32 %rd9, %r9;", bits(2.1f)), 3u);
  EXPECT_EQ(float_result("cvt.sat.f32.f32 %f9, %f1;", 7), bits(1.0f));
  EXPECT_EQ(run_one("cvt.sat.s8.s32 %r9, %r1; cvt.u64.u32 %rd9, %r9;", 300) & 0xff, 127u);
}

TEST_F(Ptx, halves_round_to_nearest_even) {
  const auto to_half = [&](float value) {
    return run_one("cvt.rn.f16.f32 %h9, %f1; cvt.u64.u16 %rd9, %h9;", bits(value));
  };
  EXPECT_EQ(to_half(1.0f), 0x3c00u);
  EXPECT_EQ(to_half(1.0f + 0x1p-11f), 0x3c00u) << "a tie to even";
  EXPECT_EQ(to_half(1.0f + 0x3p-11f), 0x3c02u) << "a tie to even";
  EXPECT_EQ(to_half(65520.0f), 0x7c00u);
  EXPECT_EQ(to_half(65519.0f), 0x7bffu);
  EXPECT_EQ(to_half(0x1p-25f), 0u) << "a tie to even";
  EXPECT_EQ(to_half(0x1.1p-25f), 1u);
  EXPECT_EQ(to_half(-0x1p-14f + 0x1p-24f), 0x83ffu) << "denormal";
  EXPECT_EQ(to_half(static_cast<float>(kNan)), 0x7fffu);
  EXPECT_EQ(run_one("cvt.rn.bf16.f32 %h9, %f1; cvt.u64.u16 %rd9, %h9;", 0x3f808000), 0x3f80u);
  EXPECT_EQ(run_one("cvt.rn.bf16.f32 %h9, %f1; cvt.u64.u16 %rd9, %h9;", 0x3f818000), 0x3f82u);
  for (std::uint32_t half = 0; half < 0x7c00; half += 7) {
    const std::uint64_t back =
        run_one("cvt.f32.f16 %f9, %h1; cvt.rn.f16.f32 %h9, %f9; cvt.u64.u16 %rd9, %h9;", half);
    ASSERT_EQ(back, half);
  }
}

TEST_F(Ptx, shifts_are_clamped_and_fields_extracted) {
  EXPECT_EQ(run_one("shl.b64 %rd9, %rd1, %r2;", 1, 64), 0u);
  EXPECT_EQ(run_one("shr.s64 %rd9, %rd1, %r2;", 1ull << 63, 200), ~0ull);
  EXPECT_EQ(run_one("shr.u64 %rd9, %rd1, %r2;", ~0ull, 63), 1u);
  EXPECT_EQ(run_one("bfe.u64 %rd9, %rd1, %r2, %r3;", 0xabcd, 4, 8), 0xbcu);
  EXPECT_EQ(run_one("bfe.s64 %rd9, %rd1, %r2, %r3;", 0xabcd, 4, 8), ~0x43ull);
  EXPECT_EQ(run_one("bfi.b64 %rd9, %rd1, %rd2, 8, 4;", 0xf, 0), 0xf00u);
  EXPECT_EQ(
      run_one("prmt.b32 %r9, %r1, %r2, 0x5410; cvt.u64.u32 %rd9, %r9;", 0x11112222, 0x33334444),
      0x44442222u);
  EXPECT_EQ(run_one("lop3.b32 %r9, %r1, %r2, %r3, 0x96; cvt.u64.u32 %rd9, %r9;", 0xf0, 0xcc, 0xaa),
            0xf0u ^ 0xccu ^ 0xaau);
  EXPECT_EQ(
      run_one("shf.l.wrap.b32 %r9, %r1, %r2, 8; cvt.u64.u32 %rd9, %r9;", 0x12345678, 0x9abcdef0),
      0xbcdef012u);
  EXPECT_EQ(run_one("mul.hi.u64 %rd9, %rd1, %rd2;", ~0ull, 16), 15u);
  EXPECT_EQ(run_one("mul.hi.s64 %rd9, %rd1, %rd2;", ~0ull, 16), ~0ull);
  EXPECT_EQ(run_one("mad.wide.s32 %rd9, %r1, %r2, %rd3;", 0xffffffff, 5, 10), 5u);
}

TEST_F(Ptx, vectors_pack_and_predicates_combine) {
  EXPECT_EQ(run_one("mov.b64 %rd9, {%r1, %r2};", 1, 2), 0x200000001u);
  EXPECT_EQ(run_one("mov.b64 {%r4, %r5}, %rd1; mov.b64 %rd9, {%r5, %r4};", 0x100000002),
            0x200000001u);
  EXPECT_EQ(run_one("{ .reg .b32 %r1; mov.u32 %r1, 7; cvt.u64.u32 %rd9, %r1; } cvt.u64.u32 %rd4, "
                    "%r1; add.s64 %rd9, %rd9, %rd4;",
                    5),
            12u)
      << "a scope has registers of its own";
  const char* both =
      "setp.lt.s32 %p1, %r1, %r2; setp.eq.and.s32 %p2|%p3, %r1, 3, !%p1; selp.u64 %rd9, 1, 0, %p2; "
      "@%p3 add.s64 %rd9, %rd9, 10;";
  EXPECT_EQ(run_one(both, 3, 1), 1u);
  EXPECT_EQ(run_one(both, 4, 1), 10u);
  EXPECT_EQ(run_one(both, 0, 1), 0u);
}

TEST_F(Ptx, shuffles_stay_in_their_segment) {
  const auto lanes = run_threads(
      "mov.u32 %r4, %laneid; shfl.sync.down.b32 %r5|%p1, %r4, 3, 0x181f, 0xffffffff;"
      "selp.u32 %r6, 100, 0, %p1; add.u32 %r5, %r5, %r6; cvt.u64.u32 %rd9, %r5;",
      32);
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    const bool in_bounds = lane % 8 + 3 < 8;
    EXPECT_EQ(lanes[lane], in_bounds ? lane + 103 : lane) << lane;
  }
  const auto votes = run_threads(
      "mov.u32 %r4, %laneid; setp.lt.u32 %p1, %r4, 5; vote.sync.ballot.b32 %r5, %p1, -1;"
      "redux.sync.add.u32 %r6, %r4, 0xffffffff; mov.b64 %rd9, {%r5, %r6};",
      32);
  EXPECT_EQ(votes[31], 0x1full | 496ull << 32);
}

TEST_F(Ptx, what_it_does_not_know_it_names) {
  try {
    run_one("ex2.approx.f32 %f9, %f1;");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnimplemented);
    EXPECT_THAT(error.what(), HasSubstr("ex2.approx.f32 %f9, %f1"));
  }
  for (const char* refused : {"add.ftz.f32 %f9, %f1, %f2;", "rcp.approx.f32 %f9, %f1;",
                              "add.rn.f16 %h9, %h1, %h1;", "call foo, ();"}) {
    EXPECT_THROW(run_one(refused), Error) << refused;
  }
}

TEST_F(Ptx, a_kernel_that_does_not_end_is_ended) {
  try {
    run_one("again: bra again;");
    FAIL();
  } catch (const Fault& fault) {
    EXPECT_EQ(fault.error, cudaErrorLaunchTimeout);
    EXPECT_THAT(fault.what(), HasSubstr("it has not ended"));
  }
}

TEST_F(Ptx, lanes_that_never_come_are_named) {
  try {
    run_threads(
        "mov.u32 %r4, %laneid; setp.eq.u32 %p1, %r4, 3; @%p1 bra there;"
        "bar.warp.sync 0xffffffff; bra out; there: bar.sync 0; out: mov.u32 %r5, 0;",
        32);
    FAIL();
  } catch (const Fault& fault) {
    EXPECT_THAT(fault.what(), HasSubstr("which do not come"));
  }
}

}  // namespace
}  // namespace ziggurat::cuda_double::ptx
