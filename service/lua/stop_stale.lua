-- Turns away what can no longer be in time: running groups, whose members are stopped, and ready ones that no trainer has had.
-- Journals: those of the groups in ARGV, all members of each. ARGV: groups.
-- Reply: ok {groups, members}: what is to be turned away next, so many that no step holds the store for long, and how many members each has.
-- What always holds: a group that could still be delivered goes on untouched.
local MOST = 1024 -- members
local job = read_job()
if not job then return reply('missing') end
local now = seconds()

for i, gid in ipairs(ARGV) do
  local g = load(GROUPS, gid)
  local oldest = g and oldest_place(gid, g)
  if oldest and oldest < oldest_allowed(job) then
    local first = (i - 1) * job.members
    turn_away(gid, g, job, math.floor(oldest / 2 ^ 32), now)
    unlink_journals(first + 1, first + member_count(g))
  end
end

local groups, seen = {}, {}
for _, id in ipairs(call('ZRANGEBYSCORE', OLDEST, '-inf', '(' .. whole(oldest_allowed(job)), 'LIMIT', 0, MOST)) do
  local gid = string.match(id, '^(.*)%-r%d+$') or id
  if not seen[gid] and (#groups == 0 or (#groups + 1) * job.members <= MOST) then
    seen[gid] = true
    groups[#groups + 1] = gid
  end
end
return reply('ok', { groups = groups, members = job.members })
