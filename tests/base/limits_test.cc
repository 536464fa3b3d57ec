// SPDX-License-Identifier: Apache-2.0
// tests/base/limits_test.cc: limits as /proc and /sys show them, on machines built under a
// temporary root and on this one.
#include "base/topology/limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat {
namespace limits_test {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class FakeRoot : public ::testing::Test {
 protected:
  FakeRoot() {
    std::string name = (fs::temp_directory_path() / "ziggurat-limits-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw system_error(errno, "mkdtemp " + name);
    root_ = fs::canonical(name);
  }
  ~FakeRoot() override {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }
  void write(const std::string& path, const std::string& text) {
    const fs::path file = root_.string() + path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::string root() const { return root_.string(); }

 private:
  fs::path root_;
};

TEST_F(FakeRoot, QuotaOfCpusIsTheTightestOnTheWayUp) {
  write("/proc/self/cgroup", "0::/job/rank\n");
  write("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  EXPECT_EQ(cgroup_cpus(root()), std::numeric_limits<double>::infinity());
  write("/sys/fs/cgroup/job/rank/cpu.max", "max 100000\n");
  EXPECT_EQ(cgroup_cpus(root()), std::numeric_limits<double>::infinity());
  write("/sys/fs/cgroup/job/cpu.max", "250000 100000\n");
  EXPECT_EQ(cgroup_cpus(root()), 2.5);
  write("/sys/fs/cgroup/job/rank/cpu.max", "150000 100000\n");
  EXPECT_EQ(cgroup_cpus(root()), 1.5);
}

TEST_F(FakeRoot, QuotaOfCpusInVersionOne) {
  write("/proc/self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/job\n0::/\n");
  write("/proc/self/mountinfo",
        "30 23 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n");
  write("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n");
  write("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_cpus(root()), std::numeric_limits<double>::infinity());
  write("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "400000\n");
  EXPECT_EQ(cgroup_cpus(root()), 4.0);
}

TEST_F(FakeRoot, UnifiedGroupsLimitIsTheTightestOnTheWayUp) {
  write("/proc/self/cgroup", "0::/user.slice/run.scope\n");
  write("/proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n");
  write("/sys/fs/cgroup/user.slice/run.scope/memory.max", "max\n");
  write("/sys/fs/cgroup/user.slice/run.scope/memory.current", "1000\n");
  write("/sys/fs/cgroup/user.slice/memory.max", "880803840\n");
  write("/sys/fs/cgroup/user.slice/memory.current", "5000\n");
  const CgroupMemory memory = cgroup_memory(root());
  EXPECT_EQ(memory.version, 2);
  EXPECT_EQ(memory.limit_bytes, 880803840U);
  EXPECT_EQ(memory.usage_bytes, 5000U);
  EXPECT_EQ(memory.path, "/sys/fs/cgroup/user.slice");
}

TEST_F(FakeRoot, GroupWithoutALimitIsUnlimited) {
  write("/proc/self/cgroup", "0::/\n");
  write("/proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  const CgroupMemory memory = cgroup_memory(root());
  EXPECT_EQ(memory.version, 2);
  EXPECT_EQ(memory.limit_bytes, kUnlimited);
}

TEST_F(FakeRoot, VersionOneCountsWhereItsMemoryControllerIsMounted) {
  write("/proc/self/cgroup", "9:name=systemd:/\n4:memory:/jobs/7\n0::/\n");
  write("/proc/self/mountinfo",
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", "9223372036854771712\n");
  write("/sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes", "1073741824\n");
  write("/sys/fs/cgroup/memory/jobs/7/memory.usage_in_bytes", "4096\n");
  const CgroupMemory memory = cgroup_memory(root());
  EXPECT_EQ(memory.version, 1);
  EXPECT_EQ(memory.limit_bytes, kGiB);
  EXPECT_EQ(memory.usage_bytes, 4096U);
}

TEST_F(FakeRoot, ContainersMountOnlyTheirOwnSubtree) {
  write("/proc/self/cgroup", "4:memory:/docker/abc\n");
  write("/proc/self/mountinfo",
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "536870912\n");
  EXPECT_EQ(cgroup_memory(root()).limit_bytes, 512 * kMiB);
}

TEST_F(FakeRoot, NoControllerInSightIsSaidSo) {
  EXPECT_EQ(cgroup_memory(root()).version, 0);
  EXPECT_EQ(cgroup_memory(root()).limit_bytes, kUnlimited);
}

constexpr const char* kVersion2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 x rw\n";
constexpr const char* kVersion1 =
    "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

/// A machine with 16 GiB that are free.
class FreeMemory : public FakeRoot {
 protected:
  FreeMemory() {
    write("/proc/meminfo", "MemTotal: 33554432 kB\nMemFree: 1024 kB\nMemAvailable: 16777216 kB\n");
  }
  /// This process is in `group`, of those that `mounts` shows.
  void be_in(const std::string& group, const std::string& mounts) {
    write("/proc/self/cgroup", group);
    write("/proc/self/mountinfo", mounts);
  }
  void write_bytes(const std::string& path, std::uint64_t value) {
    write("/sys/fs/cgroup/" + path, std::to_string(value) + "\n");
  }
};

TEST_F(FreeMemory, IsWhatTheMachineHasLeftWithoutControlGroups) {
  EXPECT_EQ(free_memory_bytes(root()), 16 * kGiB);
}

TEST_F(FreeMemory, IsThatOfTheMachineInAGroupWithoutALimit) {
  be_in("0::/user.slice/run.scope\n", kVersion2);
  write("/sys/fs/cgroup/user.slice/run.scope/memory.max", "max\n");
  write_bytes("user.slice/run.scope/memory.current", kGiB);
  EXPECT_EQ(free_memory_bytes(root()), 16 * kGiB);
}

TEST_F(FreeMemory, IsWhatTheTightestGroupLeavesWhicheverHasTheLowerLimit) {
  be_in("0::/job/rank\n", kVersion2);
  write_bytes("job/rank/memory.max", 6 * kGiB);
  write_bytes("job/rank/memory.current", kGiB);
  write_bytes("job/memory.max", 8 * kGiB);
  write_bytes("job/memory.current", 5 * kGiB);
  EXPECT_EQ(free_memory_bytes(root()), 3 * kGiB);
  write_bytes("job/memory.max", 20 * kGiB);
  write_bytes("job/memory.current", 19 * kGiB);
  EXPECT_EQ(free_memory_bytes(root()), 1 * kGiB);
}

TEST_F(FreeMemory, EndsWhereTheKernelSlowsAGroupDown) {
  be_in("0::/job\n", kVersion2);
  write("/sys/fs/cgroup/job/memory.max", "max\n");
  write_bytes("job/memory.high", 4 * kGiB);
  write_bytes("job/memory.current", kGiB);
  EXPECT_EQ(free_memory_bytes(root()), 3 * kGiB);
}

TEST_F(FreeMemory, IncludesPagesOfFilesWhichTheKernelGivesUp) {
  be_in("0::/job\n", kVersion2);
  write_bytes("job/memory.max", 4 * kGiB);
  write_bytes("job/memory.current", 4 * kGiB);
  write("/sys/fs/cgroup/job/memory.stat",
        "anon 1073741824\ninactive_file 2147483648\nactive_file 1073741824\n");
  EXPECT_EQ(free_memory_bytes(root()), 3 * kGiB);
}

TEST_F(FreeMemory, IsThatOfVersionOneBesideAnEmptyVersionTwo) {
  be_in("9:name=systemd:/\n4:memory:/jobs/7\n0::/\n",
        std::string(kVersion1) + "31 23 0:28 / /sys/fs/cgroup/unified rw - cgroup2 x rw\n");
  write_bytes("memory/memory.limit_in_bytes", 9223372036854771712U);  // no limit
  write_bytes("memory/jobs/7/memory.limit_in_bytes", 3 * kGiB);
  write_bytes("memory/jobs/7/memory.usage_in_bytes", 2 * kGiB);
  write("/sys/fs/cgroup/memory/jobs/7/memory.stat",
        "inactive_file 1\ntotal_inactive_file 1073741824\ntotal_active_file 0\n");
  EXPECT_EQ(free_memory_bytes(root()), 2 * kGiB);
}

TEST_F(FreeMemory, IsThatOfAContainerWhichMountsOnlyItsOwnGroup) {
  be_in("4:memory:/docker/abc/rank\n",
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
  write_bytes("memory/memory.limit_in_bytes", 2 * kGiB);
  write_bytes("memory/memory.usage_in_bytes", 0);
  EXPECT_EQ(free_memory_bytes(root()), 2 * kGiB);
}

TEST_F(FreeMemory, IsNothingInANamespaceThatIsFullAndThatTheProcessWasMovedOutOf) {
  be_in("0::/../other\n", kVersion2);
  write_bytes("memory.max", 2 * kGiB);
  write_bytes("memory.current", 3 * kGiB);
  EXPECT_EQ(free_memory_bytes(root()), 0U);
}

TEST_F(FreeMemory, KnowsFoldersWithSpaces) {
  be_in("0::/job\n", "31 23 0:28 / /sys/fs/c\\040group rw - cgroup2 cgroup2 rw\n");
  write("/sys/fs/c group/job/memory.max", std::to_string(5 * kGiB));
  EXPECT_EQ(free_memory_bytes(root()), 5 * kGiB);
}

TEST(FreeMemoryOfThisMachine, IsSome) { EXPECT_GT(free_memory_bytes(), 0U); }

TEST_F(FakeRoot, HugePagesAndTheModeOfTransparentOnes) {
  write("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "96\n");
  write("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "90\n");
  write("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  const HugePages pages = huge_pages(root());
  EXPECT_EQ(pages.reserved, 96U);
  EXPECT_EQ(pages.free, 90U);
  EXPECT_EQ(pages.transparent, "madvise");
}

TEST_F(FakeRoot, KernelWithoutHugePagesOrTheSwitchForUring) {
  EXPECT_EQ(huge_pages(root()).reserved, 0U);
  EXPECT_THAT(huge_pages(root()).transparent, IsEmpty());
  EXPECT_EQ(io_uring_disabled(root()), -1);
  write("/proc/sys/kernel/io_uring_disabled", "2\n");
  EXPECT_EQ(io_uring_disabled(root()), 2);
}

TEST_F(FakeRoot, FilesystemIsTheDeepestMountAndTheLatestOfEqualOnes) {
  const fs::path store = root() + "/scratch disk/run";
  fs::create_directories(store);
  std::string point = root() + "/scratch\\040disk";  // mountinfo's way to write a space
  write("/proc/self/mountinfo",
        "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "28 27 259:1 / " +
            point +
            " rw shared:2 master:1 - xfs /dev/nvme0n1p1 rw\n"
            "29 27 259:2 / " +
            point + " rw - btrfs /dev/nvme1n1 rw\n");
  const Filesystem filesystem = filesystem_of((store / "not/there/yet").string(), root());
  EXPECT_EQ(filesystem.type, "btrfs");
  EXPECT_EQ(filesystem.source, "/dev/nvme1n1");
  EXPECT_EQ(filesystem.mount_point, root() + "/scratch disk");
  EXPECT_EQ(filesystem_of("/", root()).type, "ext4");
}

TEST(Limits, MemlockIsTheSoftLimit) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  EXPECT_EQ(memlock_limit_bytes(), limit.rlim_cur == RLIM_INFINITY ? kUnlimited : limit.rlim_cur);
}

TEST(Limits, ThisMachineAnswers) {
  EXPECT_THAT(kernel_release(), Not(IsEmpty()));
  const Filesystem filesystem = filesystem_of(fs::temp_directory_path().string());
  EXPECT_THAT(filesystem.type, Not(IsEmpty()));
  EXPECT_GT(filesystem.total_bytes, 0U);
  EXPECT_LE(filesystem.available_bytes, filesystem.total_bytes);
}

TEST(Limits, NearestExistingParentIsUsedForWhatIsNotThere) {
  EXPECT_EQ(nearest_existing("/no/such/folder"), "/");
  EXPECT_EQ(nearest_existing("no-such-folder/at-all"), ".");
  EXPECT_EQ(nearest_existing("/proc/self/no-such-file"), "/proc/self");
}

}  // namespace limits_test
}  // namespace ziggurat
