// SPDX-License-Identifier: Apache-2.0
// tests/base/pci_link_test.cc: links as the kernel writes them.
#include "base/topology/pci_link.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/scratch_directory.h"

namespace ziggurat {
namespace pci_link_test {

constexpr const char* kAddress = "0000:3b:00.0";

/// A /sys with one device.
class PciLinkFiles : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) {
    const std::filesystem::path device =
        std::filesystem::path(root()) / "sys/bus/pci/devices" / kAddress;
    std::filesystem::create_directories(device);
    std::ofstream(device / name) << text << '\n';
  }
  std::string root() const { return directory_.path(); }

 private:
  testing::ScratchDirectory directory_;
};

TEST_F(PciLinkFiles, SayLanesAndSpeed) {
  write("current_link_width", "16");
  write("current_link_speed", "32.0 GT/s PCIe");
  write("max_link_width", "16");
  write("max_link_speed", "32.0 GT/s PCIe");
  const auto link = pci_link(root(), kAddress);
  ASSERT_TRUE(link);
  EXPECT_EQ(link->text(), "16 lanes at 32 GT/s");
  EXPECT_FALSE(link->narrow());
}

TEST_F(PciLinkFiles, SayWhereADeviceHasLessThanItCanDo) {
  write("current_link_width", "8");
  write("current_link_speed", "2.5 GT/s PCIe");
  write("max_link_width", "16");
  write("max_link_speed", "16.0 GT/s PCIe");
  const auto link = pci_link(root(), kAddress);
  ASSERT_TRUE(link);
  EXPECT_EQ(link->text(), "8 lanes at 2.5 GT/s, of 16 at 16");
  EXPECT_TRUE(link->narrow());
}

TEST_F(PciLinkFiles, OfALinkThatIsNotToldAreNothing) {
  EXPECT_FALSE(pci_link(root(), kAddress));
  write("current_link_width", "0");
  write("current_link_speed", "Unknown");
  EXPECT_FALSE(pci_link(root(), kAddress));
}

}  // namespace pci_link_test
}  // namespace ziggurat
