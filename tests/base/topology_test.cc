// SPDX-License-Identifier: Apache-2.0
// tests/base/topology_test.cc: machines of several shapes, described as text and as XML, and the
// one we run on.
#include "base/topology/topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "base/error.h"
#include "base/topology/block_device.h"

namespace ziggurat {
namespace topology_test {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "ziggurat-topology-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw system_error(errno, "mkdtemp " + name);
    path_ = fs::canonical(name);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

TEST(Topology, TakesTheFirstThreadOfEachCoreNodeByNode) {
  const Topology machine = Topology::from_synthetic("pack:2 [numa(memory=64GB)] core:3 pu:2");
  EXPECT_THAT(machine.physical_cores, ElementsAre(0, 2, 4, 6, 8, 10));
  ASSERT_EQ(machine.nodes.size(), 2U);
  EXPECT_EQ(machine.nodes[0].os_index, 0);
  EXPECT_THAT(machine.nodes[0].cpus, ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(machine.nodes[1].cpus, ElementsAre(6, 7, 8, 9, 10, 11));
  EXPECT_EQ(machine.nodes[0].memory_bytes, 64'000'000'000U);
}

TEST(Topology, OrdersCoresByNodeEvenIfTheKernelNumbersThemAcrossNodes) {
  // The usual numbering of a two-socket server: neighbours in number sit on different sockets.
  const Topology machine = Topology::from_synthetic("numa:2 core:2 pu:2(indexes=0,4,2,6,1,5,3,7)");
  ASSERT_EQ(machine.nodes.size(), 2U);
  EXPECT_THAT(machine.nodes[0].cpus, ElementsAre(0, 2, 4, 6));
  EXPECT_THAT(machine.nodes[1].cpus, ElementsAre(1, 3, 5, 7));
  EXPECT_THAT(machine.physical_cores, ElementsAre(0, 2, 1, 3));
}

TEST(Topology, CountsEveryCpuAsACoreWhereCoresAreNotTold) {
  const Topology machine = Topology::from_synthetic("numa:1 pu:4");
  EXPECT_THAT(machine.physical_cores, ElementsAre(0, 1, 2, 3));
}

TEST(Topology, LeavesOutMemoryWithoutCpusOfItsOwn) {
  // Both nodes hang on the one package, as high-bandwidth or device memory does.
  const Topology machine =
      Topology::from_synthetic("pack:1 [numa(memory=8GB)] [numa(memory=1GB)] core:2 pu:1");
  ASSERT_EQ(machine.nodes.size(), 1U);
  EXPECT_EQ(machine.nodes[0].os_index, 0);
  EXPECT_THAT(machine.physical_cores, ElementsAre(0, 1));
}

TEST(Topology, RefusesADescriptionThatIsNone) {
  try {
    Topology::from_synthetic("a fast machine");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("a fast machine"));
  }
}

// Two packages with a core, a node and a PCI bridge each. On the second: a GPU that CUDA and NVML
// both name, a GPU with no driver, and a drive. Core 1 is outside the control group.
constexpr const char* kTwoPackages = R"xml(<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" os_index="0" cpuset="0x0000000f" complete_cpuset="0x0000000f" allowed_cpuset="0x0000000d" nodeset="0x00000003" complete_nodeset="0x00000003" allowed_nodeset="0x00000003" gp_index="1">
  <object type="Package" os_index="0" cpuset="0x00000003" complete_cpuset="0x00000003" nodeset="0x00000001" complete_nodeset="0x00000001" gp_index="2">
   <info name="CPUModel" value="Abacus 9000"/>
   <object type="NUMANode" os_index="0" cpuset="0x00000003" complete_cpuset="0x00000003" nodeset="0x00000001" complete_nodeset="0x00000001" gp_index="3" local_memory="1073741824"/>
   <object type="Core" os_index="0" cpuset="0x00000001" complete_cpuset="0x00000001" nodeset="0x00000001" complete_nodeset="0x00000001" gp_index="4">
    <object type="PU" os_index="0" cpuset="0x00000001" complete_cpuset="0x00000001" nodeset="0x00000001" complete_nodeset="0x00000001" gp_index="5"/>
   </object>
   <object type="Core" os_index="1" cpuset="0x00000002" complete_cpuset="0x00000002" nodeset="0x00000001" complete_nodeset="0x00000001" gp_index="6">
    <object type="PU" os_index="1" cpuset="0x00000002" complete_cpuset="0x00000002" nodeset="0x00000001" complete_nodeset="0x00000001" gp_index="7"/>
   </object>
  </object>
  <object type="Package" os_index="1" cpuset="0x0000000c" complete_cpuset="0x0000000c" nodeset="0x00000002" complete_nodeset="0x00000002" gp_index="8">
   <object type="NUMANode" os_index="1" cpuset="0x0000000c" complete_cpuset="0x0000000c" nodeset="0x00000002" complete_nodeset="0x00000002" gp_index="9" local_memory="2147483648"/>
   <object type="Core" os_index="2" cpuset="0x0000000c" complete_cpuset="0x0000000c" nodeset="0x00000002" complete_nodeset="0x00000002" gp_index="10">
    <object type="PU" os_index="2" cpuset="0x00000004" complete_cpuset="0x00000004" nodeset="0x00000002" complete_nodeset="0x00000002" gp_index="11"/>
    <object type="PU" os_index="3" cpuset="0x00000008" complete_cpuset="0x00000008" nodeset="0x00000002" complete_nodeset="0x00000002" gp_index="12"/>
   </object>
   <object type="Bridge" gp_index="13" bridge_type="0-1" depth="0" bridge_pci="0000:[64-67]">
    <object type="PCIDev" gp_index="14" pci_busid="0000:65:00.0" pci_type="0302 [10de:2330] [0000:0000] a1" pci_link_speed="31.5">
     <object type="OSDev" gp_index="15" name="nvml0" osdev_type="1"/>
     <object type="OSDev" gp_index="16" name="cuda0" osdev_type="5" subtype="CUDA"/>
    </object>
    <object type="PCIDev" gp_index="17" pci_busid="0000:66:00.0" pci_type="0302 [10de:2330] [0000:0000] a1" pci_link_speed="31.5"/>
    <object type="PCIDev" gp_index="18" pci_busid="0000:67:00.0" pci_type="0108 [144d:a80a] [0000:0000] 00" pci_link_speed="7.9">
     <object type="OSDev" gp_index="19" name="nvme0n1" osdev_type="0"/>
    </object>
   </object>
  </object>
 </object>
</topology>
)xml";

TEST(Topology, ReadsGpusDrivesAndTheAllowedCpusFromXml) {
  const TemporaryFolder folder;
  const fs::path file = folder.path() / "machine.xml";
  std::ofstream(file) << kTwoPackages;
  const Topology machine = Topology::from_xml(file.string());

  EXPECT_EQ(machine.cpu_model, "Abacus 9000");
  EXPECT_THAT(machine.physical_cores, ElementsAre(0, 2));
  ASSERT_EQ(machine.nodes.size(), 2U);
  EXPECT_THAT(machine.nodes[0].cpus, ElementsAre(0));
  EXPECT_EQ(machine.nodes[1].memory_bytes, 2147483648U);

  ASSERT_EQ(machine.accelerators.size(), 2U);
  EXPECT_EQ(machine.accelerators[0].name, "0000:66:00.0");
  EXPECT_EQ(machine.accelerators[1].name, "cuda0");
  EXPECT_EQ(machine.accelerators[1].numa_node, 1);

  ASSERT_EQ(machine.pci_devices.size(), 3U);
  EXPECT_EQ(machine.pci_devices[2].address, "0000:67:00.0");
  EXPECT_EQ(machine.pci_devices[2].numa_node, 1);
}

TEST(Topology, NamesAFileThatCannotBeRead) {
  try {
    Topology::from_xml("/no/such/machine.xml");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("/no/such/machine.xml"));
  }
}

TEST(Topology, FindsThisMachinesCores) {
  const Topology machine = Topology::discover();
  ASSERT_FALSE(machine.physical_cores.empty());
  ASSERT_FALSE(machine.nodes.empty());
  EXPECT_GT(machine.nodes[0].memory_bytes, 0U);
  cpu_set_t usable;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(usable), &usable), 0);
  for (int cpu : machine.physical_cores)
    EXPECT_TRUE(CPU_ISSET(static_cast<unsigned>(cpu), &usable)) << cpu;
}

/// An X server that closes each connection at once and counts them.
class CountingXServer {
 public:
  CountingXServer() : socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
    const std::string name = "/tmp/.X11-unix/X0";  // after a NUL: no file of that name
    name.copy(address.sun_path + 1, name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    listens_ = ::bind(socket_, reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
               ::listen(socket_, 64) == 0;
    if (!listens_) return;
    thread_ = std::thread([this] {
      for (int guest = 0; (guest = ::accept(socket_, nullptr, nullptr)) >= 0; ::close(guest))
        ++connections_;
    });
  }
  ~CountingXServer() {
    static_cast<void>(connections());
    ::close(socket_);
  }
  bool listens() const { return listens_; }
  /// Those so far; no more are taken.
  int connections() {
    if (thread_.joinable()) {
      ::shutdown(socket_, SHUT_RDWR);
      thread_.join();
    }
    return connections_;
  }

 private:
  int socket_;
  bool listens_ = false;
  std::atomic<int> connections_{0};
  std::thread thread_;
};

TEST(Topology, LeavesTheXServersAlone) {
  CountingXServer server;
  if (!server.listens()) GTEST_SKIP() << "a real X server runs here";
  static_cast<void>(Topology::discover());
  EXPECT_EQ(server.connections(), 0);
}

TEST(Topology, KeepsToTheCpusThisThreadIsBoundTo) {
  cpu_set_t before;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(before), &before), 0);
  unsigned last = 0;
  for (unsigned cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &before)) last = cpu;
  }
  std::thread([last] {  // a thread of its own: the binding ends with it
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(last, &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_THAT(Topology::discover().physical_cores, ElementsAre(static_cast<int>(last)));
  })
      .join();
}

// A small sysfs: what the kernel shows for drives that are stacked on each other.
class Sysfs {
 public:
  /// A block device at `device` (relative to /sys/devices) with these numbers.
  fs::path add(unsigned major_number, unsigned minor_number, const std::string& device) {
    const fs::path target = root() / "sys/devices" / device;
    fs::create_directories(target);
    const fs::path links = root() / "sys/dev/block";
    fs::create_directories(links);
    fs::create_directory_symlink(
        target, links / (std::to_string(major_number) + ":" + std::to_string(minor_number)));
    return target;
  }
  static void stack(const fs::path& upper, const fs::path& lower) {
    fs::create_directories(upper / "slaves");
    fs::create_directory_symlink(lower, upper / "slaves" / lower.filename());
  }
  std::vector<std::string> drives(unsigned major_number, unsigned minor_number) const {
    return internal::pci_addresses_of_device(root().string(), makedev(major_number, minor_number));
  }
  fs::path root() const { return folder_.path(); }

 private:
  TemporaryFolder folder_;
};

TEST(BlockDevice, IsTheLastPciDeviceOnTheWay) {
  Sysfs sysfs;
  sysfs.add(259, 1, "pci0000:64/0000:64:01.0/0000:67:00.0/nvme/nvme0/nvme0n1/nvme0n1p2");
  EXPECT_THAT(sysfs.drives(259, 1), ElementsAre("0000:67:00.0"));
}

TEST(BlockDevice, FollowsDeviceMapperAndRaidDownToEveryDrive) {
  Sysfs sysfs;
  const fs::path first = sysfs.add(259, 0, "pci0000:64/0000:67:00.0/nvme/nvme0/nvme0n1");
  const fs::path second = sysfs.add(259, 4, "pci0000:b0/0000:b1:00.0/nvme/nvme1/nvme1n1");
  const fs::path raid = sysfs.add(9, 0, "virtual/block/md0");
  const fs::path volume = sysfs.add(253, 0, "virtual/block/dm-0");
  Sysfs::stack(raid, first);
  Sysfs::stack(raid, second);
  Sysfs::stack(volume, raid);
  EXPECT_THAT(sysfs.drives(253, 0), ElementsAre("0000:67:00.0", "0000:b1:00.0"));
}

TEST(BlockDevice, FollowsAPartitionOfAStackedDevice) {
  Sysfs sysfs;
  const fs::path drive = sysfs.add(259, 0, "pci0000:64/0000:67:00.0/nvme/nvme0/nvme0n1");
  const fs::path raid = sysfs.add(9, 0, "virtual/block/md0");
  Sysfs::stack(raid, drive);
  const fs::path partition = sysfs.add(259, 9, "virtual/block/md0/md0p1");
  std::ofstream(partition / "partition") << "1\n";
  EXPECT_THAT(sysfs.drives(259, 9), ElementsAre("0000:67:00.0"));
}

TEST(BlockDevice, FollowsTheControllersOfAMultipathHead) {
  Sysfs sysfs;
  sysfs.add(259, 0, "virtual/nvme-subsystem/nvme-subsys0/nvme0n1");
  const fs::path controller = sysfs.root() / "sys/devices/pci0000:64/0000:67:00.0/nvme/nvme0";
  fs::create_directories(controller);
  fs::create_directory_symlink(
      controller, sysfs.root() / "sys/devices/virtual/nvme-subsystem/nvme-subsys0/nvme0");
  EXPECT_THAT(sysfs.drives(259, 0), ElementsAre("0000:67:00.0"));
}

TEST(BlockDevice, EndsEvenIfDevicesAreStackedInACircle) {
  Sysfs sysfs;
  const fs::path one = sysfs.add(253, 0, "virtual/block/dm-0");
  const fs::path other = sysfs.add(253, 1, "virtual/block/dm-1");
  Sysfs::stack(one, other);
  Sysfs::stack(other, one);
  EXPECT_THAT(sysfs.drives(253, 0), IsEmpty());
}

TEST(BlockDevice, IsUnknownForWhatHasNoDrive) {
  Sysfs sysfs;
  EXPECT_THAT(sysfs.drives(259, 0), IsEmpty());  // no such device
  sysfs.add(252, 0, "virtual/block/zram0");
  EXPECT_THAT(sysfs.drives(252, 0), IsEmpty());
  EXPECT_EQ(numa_node_of_path("/proc", Topology::from_synthetic("numa:1 pu:1")), -1);
}

TEST(BlockDevice, IsAskedForByPathsThatDoNotExistYet) {
  const TemporaryFolder folder;
  EXPECT_EQ(internal::block_device_of_path("", (folder.path() / "not/yet").string()),
            internal::block_device_of_path("", folder.path().string()));
}

}  // namespace topology_test
}  // namespace ziggurat
