// What ggml's barriers order, told to the thread sanitizer, which cannot see them: all that a thread did before it
// released is visible to every thread that acquires later. Nothing in an ordinary build.

#pragma once

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void *);
extern "C" void __tsan_release(void *);
#endif

namespace s2moe {

#if defined(__SANITIZE_THREAD__)
inline char ggml_barriers;

inline void release_to_others() {
    __tsan_release(&ggml_barriers);
}

inline void acquire_from_others() {
    __tsan_acquire(&ggml_barriers);
}
#else
inline void release_to_others() {
}

inline void acquire_from_others() {
}
#endif

} // namespace s2moe
