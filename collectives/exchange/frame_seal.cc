// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/frame_seal.cc: makes checksums with xxHash and tags with libcrypto.
#include "collectives/exchange/frame_seal.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <cstring>

#include "base/checksum.h"
#include "base/error.h"

namespace ziggurat::wire {
namespace {

/// Makes tags by AES-GCM over additional data only, which is GMAC.
class Gmac {
 public:
  explicit Gmac(const SealKey& key) : context_(::EVP_CIPHER_CTX_new()) {
    must(context_ != nullptr && ::EVP_EncryptInit_ex(context_.get(), ::EVP_aes_256_gcm(), nullptr,
                                                     bytes(key.data()), nullptr) == 1);
  }

  /// Makes a tag. Each `number` may be used only once with a key.
  Tag tag(std::uint64_t number, std::span<const std::byte> data) {
    std::array<unsigned char, 12> nonce{};
    std::memcpy(nonce.data() + 4, &number, sizeof(number));
    EVP_CIPHER_CTX* const context = context_.get();
    Tag made;
    int length = 0;
    must(::EVP_EncryptInit_ex(context, nullptr, nullptr, nullptr, nonce.data()) == 1 &&
         ::EVP_EncryptUpdate(context, nullptr, &length, bytes(data.data()),
                             static_cast<int>(data.size())) == 1 &&
         ::EVP_EncryptFinal_ex(context, nullptr, &length) == 1 &&
         ::EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, static_cast<int>(made.size()),
                               made.data()) == 1);
    return made;
  }

 private:
  struct Free {
    void operator()(EVP_CIPHER_CTX* context) const { ::EVP_CIPHER_CTX_free(context); }
  };
  static const unsigned char* bytes(const std::byte* data) {
    return reinterpret_cast<const unsigned char*>(data);
  }
  static void must(bool good) {
    if (!good) throw Error(ErrorCode::kUnavailable, "libcrypto cannot compute AES-256-GMAC");
  }

  std::unique_ptr<EVP_CIPHER_CTX, Free> context_;
};

Tag checksum(std::span<const std::byte> data, std::uint64_t seed) {
  const std::uint64_t hash = hash64(data, seed);
  Tag tag{};
  std::memcpy(tag.data(), &hash, sizeof(hash));
  return tag;
}

bool same(const Tag& a, const Tag& b) { return ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

std::span<const std::byte> sealed_bytes(const FrameHeader& header) {
  return std::as_bytes(std::span(&header, 1)).first(offsetof(FrameHeader, tag));
}

}  // namespace

PayloadMark PayloadSeal::mark(std::uint64_t number, std::span<const std::byte> payload,
                              const CallKey& key, std::uint64_t offset) const {
  if (key_) return {number, Gmac(*key_).tag(number, payload)};
  return {number, checksum(payload, mix_seed(mix_seed(key.communicator, key.sequence), offset))};
}

bool PayloadSeal::matches(const PayloadMark& its, std::span<const std::byte> payload,
                          const CallKey& key, std::uint64_t offset) const {
  return same(its.tag, mark(its.number, payload, key, offset).tag);
}

class HeaderSeal::Direction {
 public:
  explicit Direction(const SealKey& key) : gmac_(key) {}
  Tag next(const FrameHeader& header) { return gmac_.tag(frames_++, sealed_bytes(header)); }

 private:
  Gmac gmac_;
  std::uint64_t frames_ = 0;
};

HeaderSeal::HeaderSeal(std::uint64_t epoch) : epoch_(epoch) {}
HeaderSeal::HeaderSeal(std::uint64_t epoch, const std::optional<ConnectionKeys>& keys)
    : epoch_(epoch) {
  if (!keys) return;
  out_ = std::make_unique<Direction>(keys->send);
  in_ = std::make_unique<Direction>(keys->receive);
}
HeaderSeal::~HeaderSeal() = default;
HeaderSeal::HeaderSeal(HeaderSeal&&) noexcept = default;
HeaderSeal& HeaderSeal::operator=(HeaderSeal&&) noexcept = default;

void HeaderSeal::seal(FrameHeader& header) {
  header.tag = out_ ? out_->next(header) : checksum(sealed_bytes(header), epoch_);
}

void HeaderSeal::check(const FrameHeader& header) {
  check_version(header);
  if (in_ ? same(header.tag, in_->next(header))
          : same(header.tag, checksum(sealed_bytes(header), epoch_))) {
    return;
  }
  throw Error(
      ErrorCode::kUnavailable,
      in_ ? "sent a frame whose header has a wrong tag: the frame was damaged on the way, or "
            "another machine on the network made, moved or repeated it"
          : "sent a frame whose header fails its checksum: the frame was damaged on the way, or "
            "belongs to another job");
}

}  // namespace ziggurat::wire
