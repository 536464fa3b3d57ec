// SPDX-License-Identifier: Apache-2.0
// tests/base/trace_test.cc: what we write is the JSON that trace viewers read, from any number of
// threads.
#include "base/runtime/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"

namespace ziggurat {
namespace trace_test {

namespace fs = std::filesystem;

class TraceFile : public ::testing::Test {
 protected:
  TraceFile() {
    std::string name = (fs::temp_directory_path() / "ziggurat-trace-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw system_error(errno, "mkdtemp " + name);
    folder_ = name;
  }
  ~TraceFile() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  std::string path() const { return (folder_ / "run.trace.json").string(); }
  nlohmann::json read() const { return nlohmann::json::parse(std::ifstream(path())); }

 private:
  fs::path folder_;
};

// Whatever is tried after a full disk has other errnos.
TEST(Trace, SaysOnceThatItCannotBeWrittenAndTheErrnoOfTheFirstFailure) {
  ::testing::internal::CaptureStderr();
  {
    const auto trace = Trace::open("/dev/full");
    const int track = trace->track("worker 0");
    for (int i = 0; i < 1000; ++i) trace->span(track, "work", monotonic_now(), monotonic_now());
    EXPECT_FALSE(trace->flush());
    errno = ENOTTY;
    trace->span(track, "work", monotonic_now(), monotonic_now());
    EXPECT_FALSE(trace->flush());
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("the trace /dev/full: ENOSPC"), std::string::npos) << said;
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
}

TEST_F(TraceFile, HoldsNamedTracksAndSpansInMicroseconds) {
  {
    const auto trace = Trace::open(path());
    const int disk = trace->track("disk \"nvme0\"\\read");
    const Nanoseconds begin = monotonic_now();
    trace->span(disk, "read", begin, begin + Nanoseconds(1'500), 7);
    trace->span(disk, "read", begin + Nanoseconds(2'000), begin + Nanoseconds(3'000));
  }
  std::string name;
  std::vector<nlohmann::json> spans;
  for (const auto& event : read()) {
    if (event["ph"] == "M" && event["name"] == "thread_name") name = event["args"]["name"];
    if (event["ph"] == "X") spans.push_back(event);
  }
  EXPECT_EQ(name, "disk \"nvme0\"\\read");
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0]["name"], "read");
  EXPECT_DOUBLE_EQ(spans[0]["dur"].get<double>(), 1.5);
  EXPECT_EQ(spans[0]["args"]["id"], 7);
  EXPECT_EQ(spans[0]["tid"], spans[1]["tid"]);
  EXPECT_FALSE(spans[1].contains("args"));
  EXPECT_NEAR(spans[1]["ts"].get<double>() - spans[0]["ts"].get<double>(), 2.0, 0.0011);
}

TEST_F(TraceFile, LanesOfOneResourceStandTogetherHoweverLateTheyAreMade) {
  {
    const auto trace = Trace::open(path());
    for (const char* name : {"worker 0", "nvme read", "nvme write", "nvme read 2", "worker 1"})
      trace->track(name);
  }
  std::map<int, std::string> name_of;
  std::map<int, std::string> sorted;
  for (const auto& event : read()) {
    if (event["name"] == "thread_name") name_of[event["tid"]] = event["args"]["name"];
    if (event["name"] == "thread_sort_index")
      sorted[event["args"]["sort_index"]] = name_of.at(event["tid"]);
  }
  std::vector<std::string> rows;
  for (const auto& [index, name] : sorted) rows.push_back(name);
  EXPECT_EQ(rows, (std::vector<std::string>{"worker 0", "worker 1", "nvme read", "nvme read 2",
                                            "nvme write"}));
}

TEST_F(TraceFile, WithoutEventsIsValidToo) {
  Trace::open(path());
  EXPECT_TRUE(read().is_array());
  EXPECT_TRUE(read().empty());
}

TEST_F(TraceFile, ManyThreadsWriteWholeEvents) {
  constexpr int kThreads = 4;
  constexpr int kSpans = 250;
  {
    const auto trace = Trace::open(path());
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&trace, t] {
        const int track = trace->track("thread " + std::to_string(t));
        for (int i = 0; i < kSpans; ++i) const TraceSpan span(trace.get(), track, "work", i);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  int spans = 0;
  for (const auto& event : read()) spans += event["ph"] == "X" ? 1 : 0;
  EXPECT_EQ(spans, kThreads * kSpans);
}

TEST_F(TraceFile, SpanWithoutATraceCostsNothingAndIsAllowed) {
  const TraceSpan span(nullptr, 0, "nothing");
}

TEST_F(TraceFile, FileThatCannotBeCreatedIsNamedWithItsFlag) {
  try {
    Trace::open("/no/such/folder/t.json");
    FAIL() << "opened";
  } catch (const Error& error) {
    EXPECT_EQ(
        std::string(error.what()).find("`trace`: cannot create /no/such/folder/t.json: ENOENT"),
        0U);
    EXPECT_EQ(error.native(), ENOENT);
  }
}

}  // namespace trace_test
}  // namespace ziggurat
