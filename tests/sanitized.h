#pragma once

namespace treeline {

// Whether a sanitizer watches this build. It makes everything many times slower, so tests that
// repeat themselves over many shapes take fewer of them: memory and races do not depend on all.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace treeline
